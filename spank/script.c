/*
 * Turn the #SBATCH lines of a batch script into what the user said in them.
 *
 * sbatch tells the plugin of its own option only, and lets SBATCH_* variables win over #SBATCH lines: what we
 * put must not win over what the user wrote there, and the partition decides whether the site enables the
 * option.
 *
 * Rule 1: reads what sbatch reads: from the beginning to the first line that is no comment, 64 KiB at most.
 * Rule 2: takes nothing from standard input that sbatch has yet to read: a file is read at its place, the
 *         content of a pipe is copied.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jit_ckpt.h"

enum { LONGEST = 64 << 10 };
enum { PATIENCE = 1000 }; /* ms for whoever writes a script into a pipe to end; sbatch would wait for ever */
static const char MAGIC[] = "#SBATCH";

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* Take the next word of a line into `word`, which has room for all of the line; false at the end or a
 * comment. */
static bool next_word(const char **line, char *word)
{
    const char *from = *line;
    char *to = word, quote = '\0';

    while (is_blank(*from))
        from++;
    if (*from == '\0' || *from == '#')
        return false;
    for (; *from != '\0' && (quote != '\0' || !is_blank(*from)); from++) {
        if (*from == quote)
            quote = '\0';
        else if (quote == '\0' && (*from == '"' || *from == '\''))
            quote = *from;
        else if (*from == '\\' && from[1] != '\0' && quote != '\'')
            *to++ = *++from;
        else
            *to++ = *from;
    }
    *to = '\0';
    *line = from;
    return true;
}

/* Read the text of a script; it is changed on the way. */
void jit_wishes_of_text(struct jit_wishes *wishes, char *text)
{
    static char word[LONGEST + 1];
    struct jit_scan scan = {.wishes = wishes, .sbatch = true};
    char *line;

    while ((line = strsep(&text, "\n")) != NULL) {
        const char *rest = line;

        if (strncmp(line, MAGIC, sizeof(MAGIC) - 1) != 0) {
            if (line[strspn(line, " \t\r\v\f")] != '#' && line[strspn(line, " \t\r\v\f")] != '\0')
                return;
            continue;
        }
        rest += sizeof(MAGIC) - 1;
        while (next_word(&rest, word)) {
            if (!scan.waits && (strcmp(word, "hetjob") == 0 || strcmp(word, "packjob") == 0)) {
                wishes->heterogeneous = true;
                return;
            }
            jit_scan_word(&scan, word);
        }
    }
}

/* Copy what is in the pipe `file` once all of it is there: sbatch waits for that too, and finds it untouched.
 */
static ssize_t peek(int file, char *text)
{
    struct pollfd ended = {.fd = file}; /* woken by the end of the last writer only */
    int copy[2];
    ssize_t size = -1, more = 0;

    if (poll(&ended, 1, PATIENCE) != 1 || (ended.revents & POLLHUP) == 0 || pipe2(copy, O_CLOEXEC) != 0)
        return -1;
    if (tee(file, copy[1], LONGEST, SPLICE_F_NONBLOCK) >= 0)
        size = 0;
    (void)close(copy[1]);
    while (size >= 0 && size < LONGEST && (more = read(copy[0], text + size, (size_t)(LONGEST - size))) > 0)
        size += more;
    (void)close(copy[0]);
    return more < 0 ? -1 : size;
}

static ssize_t read_script(const char *path, char *text)
{
    bool named = path[0] != '\0';
    int file = named ? open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : STDIN_FILENO;
    struct stat info;
    ssize_t size = -1;
    off_t begin;

    if (file < 0 || fstat(file, &info) != 0)
        size = -1;
    else if (S_ISREG(info.st_mode) && (begin = named ? 0 : lseek(file, 0, SEEK_CUR)) >= 0)
        size = pread(file, text, LONGEST, begin);
    else if (S_ISFIFO(info.st_mode) && !named)
        size = peek(file, text);
    if (named && file >= 0)
        (void)close(file);
    return size;
}

/* Read the script that `command` names, or standard input where it names none; false if it cannot be seen. */
bool jit_wishes_of_script(struct jit_wishes *wishes, const struct jit_wishes *command)
{
    static char text[LONGEST + 1];
    int reason = errno;
    ssize_t size;

    memset(wishes, 0, sizeof(*wishes));
    if (command->said[JIT_SAYS_WRAP])
        return true;
    size = read_script(command->script, text);
    errno = reason;
    if (size < 0)
        return false;
    text[size] = '\0'; /* a null byte before it ends what we see; no script has one */
    jit_wishes_of_text(wishes, text);
    return true;
}

/* Turn Slurm's way of writing a time limit (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s) into seconds; 0 for
 * others. */
long jit_seconds(const char *text)
{
    long part[4] = {0, 0, 0, 0}; /* days, then what the colons part */
    int count = 0;
    bool days = false;

    for (;; text++) {
        long number = 0;

        if (*text < '0' || *text > '9' || count == 3)
            return 0;
        for (; *text >= '0' && *text <= '9'; text++)
            if ((number = number * 10 + (*text - '0')) > 10000000)
                return 0;
        if (*text == '-' && !days && count == 0) {
            part[0] = number;
            days = true;
            continue;
        }
        part[++count] = number;
        if (*text == '\0')
            break;
        if (*text != ':')
            return 0;
    }
    if (days)
        return ((part[0] * 24 + part[1]) * 60 + part[2]) * 60 + part[3];
    if (count == 3)
        return (part[1] * 60 + part[2]) * 60 + part[3];
    return part[1] * 60 + part[2]; /* minutes, or minutes and seconds */
}
