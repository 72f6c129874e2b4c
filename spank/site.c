/*
 * Turn the site's file, /etc/jit-ckpt.conf, and the plugin's arguments in plugstack.conf into what the
 * administrator decided.
 *
 * Rule 1: accepts exactly what slurm_plugin/site.py accepts; tests/spank/test_site.py compares the two.
 * Rule 2: a file that cannot be used is refused as a whole; one that is missing means defaults.
 * Rule 3: it is read by root too, so it counts only if nobody but root, or the reader, can write it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jit_ckpt.h"

enum { LONGEST = 64 << 10 }; /* bytes of a file that a person wrote */

#define TABLE_ROW(name, allowed, kind, least, most) {name, allowed, kind, least, most},
static const struct jit_key SITE_KEYS[JIT_SITE_KEY_COUNT] = {JIT_SITE_KEYS(TABLE_ROW)};

#define NAME_AND_COMMA(name, allowed, kind, least, most) ", " name
static const char SITE_NAMES[] = "" JIT_SITE_KEYS(NAME_AND_COMMA); /* begins with a comma and a space */
static const char OPTION_NAMES[] = "" JIT_KEYS(NAME_AND_COMMA);
enum { TAIL = sizeof(", resume") - 1 }; /* the last of the option's keys cannot have a site's default */

static size_t strip(const char **text, size_t length)
{
    for (; length > 0 && (**text == ' ' || **text == '\t'); length--)
        (*text)++;
    while (length > 0 && ((*text)[length - 1] == ' ' || (*text)[length - 1] == '\t'))
        length--;
    return length;
}

/* Where a comment begins in a line without blanks around it, or its end. */
static size_t before_comment(const char *line, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (line[i] == '#' && (i == 0 || line[i - 1] == ' ' || line[i - 1] == '\t'))
            return i;
    return length;
}

/* Take one `key=value`, a line of the file or an argument; `lines` remembers where a key was, if it is given.
 */
static int take(struct jit_site *site, const char *text, size_t length, int number, int *lines,
                struct jit_why *why)
{
    const char *equals = memchr(text, '=', length), *value = equals ? equals + 1 : text + length;
    size_t size = strip(&value, length - (size_t)(value - text));
    size_t name = strip(&text, equals ? (size_t)(equals - text) : length);
    int k = jit_key_find(SITE_KEYS, JIT_SITE_KEY_COUNT, text, name);
    int o = jit_key_find(JIT_OPTION_KEYS, JIT_KEY_RESUME, text, name); /* without `resume` */
    int *line = lines ? &lines[k < 0 ? JIT_SITE_KEY_COUNT + o : k] : NULL;

    if (k < 0 && o < 0) {
        jit_why_set(why, "cannot use key '%.*s': unknown; allowed keys: %s%.*s", (int)name, text,
                    SITE_NAMES + 2, (int)(sizeof(OPTION_NAMES) - 1 - TAIL), OPTION_NAMES);
        return -1;
    }
    if (lines == NULL && k >= jit_key_find(SITE_KEYS, JIT_SITE_KEY_COUNT, "python", 6)) {
        jit_why_set(why, "cannot use key '%.*s' here: the hooks read the file only", (int)name, text);
        return -1;
    }
    if (jit_key_take(k < 0 ? &JIT_OPTION_KEYS[o] : &SITE_KEYS[k], value, size,
                     k < 0 ? site->options.value[o] : site->value[k], why) != 0)
        return -1;
    if (line != NULL && *line != 0) {
        jit_why_set(why, "cannot use key '%.*s': it is in line %d already", (int)name, text, *line);
        return -1;
    }
    if (line != NULL)
        *line = number;
    return 0;
}

static int take_line(struct jit_site *site, const char *line, size_t length, int number, int *lines,
                     struct jit_why *why)
{
    if (memchr(line, '\0', length) != NULL) {
        jit_why_set(why, "cannot use this line: it holds a null byte");
        return -1;
    }
    length = strip(&line, length);
    length = strip(&line, before_comment(line, length));
    return length == 0 ? 0 : take(site, line, length, number, lines, why);
}

/* Read the text of the file `path`, which messages name. */
int jit_site_parse(struct jit_site *site, const char *text, size_t size, const char *path,
                   struct jit_why *why)
{
    int lines[JIT_SITE_KEY_COUNT + JIT_KEY_COUNT] = {0}, number = 0;
    struct jit_why inner = {""};

    if (size > LONGEST) {
        jit_why_set(why, "%s: cannot read it: longer than %d bytes", path, LONGEST);
        return -1;
    }
    for (const char *end = text + size; text <= end; number++) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        size_t length = (size_t)((stop ? stop : end) - text);

        if (take_line(site, text, length, number + 1, lines, &inner) != 0) {
            jit_why_set(why, "%s:%d: %s", path, number + 1, inner.text);
            return -1;
        }
        text += length + 1;
    }
    return 0;
}

/* Read a file whole into `text`; return its size, 0 if there is none, -1 with the reason if it cannot be
 * used. */
static ssize_t read_file(const char *path, char *text, size_t room, struct jit_why *why)
{
    int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat info;
    ssize_t size = -1;

    if (file < 0 && errno == ENOENT)
        return 0;
    if (file < 0 || fstat(file, &info) != 0)
        jit_why_set(why, "%s: cannot read it: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        jit_why_set(why, "%s: cannot read it: not a file", path);
    else if ((info.st_uid != 0 && info.st_uid != geteuid()) || (info.st_mode & 0022) != 0)
        jit_why_set(why, "%s: cannot trust it: others than root can write it", path);
    else if ((size = read(file, text, room)) < 0)
        jit_why_set(why, "%s: cannot read it: %s", path, strerror(errno));
    if (file >= 0)
        (void)close(file);
    return size;
}

/* Read the file, then the arguments, which win: conf=PATH, shim-dir=PATH and keys for submission. */
int jit_site_load(struct jit_site *site, int count, char *arguments[], struct jit_why *why)
{
    static char text[LONGEST + 1];
    struct jit_why inner = {""};
    const char *path = JIT_SITE;
    ssize_t size;

    site->shim_dir = JIT_SHIM_DIR;
    for (int i = 0; i < count; i++)
        if (strncmp(arguments[i], "conf=", 5) == 0)
            path = arguments[i] + 5;
        else if (strncmp(arguments[i], "shim-dir=", 9) == 0)
            site->shim_dir = arguments[i] + 9;
    size = read_file(path, text, sizeof(text), why);
    if (size < 0 || jit_site_parse(site, text, (size_t)size, path, why) != 0)
        return -1;
    for (int i = 0; i < count; i++) {
        const char *word = arguments[i];

        if (strncmp(word, "conf=", 5) == 0 || strncmp(word, "shim-dir=", 9) == 0)
            continue;
        if (take(site, word, strlen(word), 0, NULL, &inner) != 0) {
            jit_why_set(why, "plugstack.conf: %s", inner.text);
            return -1;
        }
    }
    return 0;
}

static const char *value_of(const struct jit_site *site, const char *name)
{
    int k = jit_key_find(SITE_KEYS, JIT_SITE_KEY_COUNT, name, strlen(name));

    return k < 0 ? "" : site->value[k];
}

bool jit_site_switch(const struct jit_site *site, const char *name, bool usual)
{
    const char *value = value_of(site, name);

    return value[0] == '\0' ? usual : strcmp(value, "on") == 0;
}

static bool has(const char *list, const char *word, size_t size)
{
    const char *item;
    size_t length;

    while (jit_list_next(&list, &item, &length))
        if (length == size && strncmp(item, word, size) == 0)
            return true;
    return false;
}

/* Whether a job for these partitions (commas between them; "" where the user names none) has the option
 * without asking. A job that may start in several has it if one of them does. */
bool jit_site_enables(const struct jit_site *site, const char *partitions)
{
    const char *enable = value_of(site, "enable"), *item;
    size_t length;

    if (enable[0] == '\0' || strcmp(enable, "off") == 0)
        return false;
    if (strcmp(enable, "on") == 0)
        return true;
    if (partitions[0] == '\0')
        partitions = value_of(site, "default-partition");
    while (jit_list_next(&partitions, &item, &length))
        if (length > 0 && has(enable, item, length))
            return true;
    return false;
}

struct limit {
    const char *key;
    const char *most;
    uint32_t usual;
};

#define LIMIT_ROW(key, most, usual) {key, most, usual},
static const struct limit LIMITS[] = {JIT_LIMITS(LIMIT_ROW)};

/* Refuse what the user asked for beyond the site's limits. */
int jit_site_limit(const struct jit_site *site, const struct jit_options *asked, struct jit_why *why)
{
    for (size_t i = 0; i < JIT_LENGTH(LIMITS); i++) {
        const char *most = value_of(site, LIMITS[i].most), *value = jit_options_value(asked, LIMITS[i].key);

        if (most[0] != '\0' && value[0] != '\0' && jit_whole_part(value) > jit_whole_part(most)) {
            jit_why_set(why, "cannot use key '%s' with value '%s': this site allows at most %s",
                        LIMITS[i].key, value, most);
            return -1;
        }
    }
    return 0;
}

/* Give the options the site's defaults; a default, the site's or ours, is never above the site's limit. */
void jit_site_fill(const struct jit_site *site, struct jit_options *options)
{
    jit_options_fill(options, &site->options);
    for (size_t i = 0; i < JIT_LENGTH(LIMITS); i++) {
        int k = jit_key_find(JIT_OPTION_KEYS, JIT_KEY_COUNT, LIMITS[i].key, strlen(LIMITS[i].key));
        const char *most = value_of(site, LIMITS[i].most);
        char *value = options->value[k];

        if (most[0] != '\0' && (value[0] ? jit_whole_part(value) : LIMITS[i].usual) > jit_whole_part(most))
            memcpy(value, most, strlen(most) + 1);
    }
}
