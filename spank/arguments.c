/*
 * Turn a command line into one answer: was `--jit-ckpt` given to Slurm's command itself?
 *
 * Needed because slurm_spank_init is the last moment at which SBATCH_* still counts, and options of the
 * command line are told to the plugin only later.
 *
 * Rule 1: an option behind the script's or program's name is not ours. Finding that name needs to know which
 *         options stand without a value; others than these are taken to have one, as most of Slurm's do.
 * Rule 2: a wrong guess costs a job nothing but no-kill, requeue and append; it never refuses a job.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jit_ckpt.h"

/* Options of sbatch, salloc and srun (22.05 to 25.11) whose next word is not their value. `wait` and -W take
 * a value in srun and salloc, not in sbatch. */
/* clang-format off */
static const char *const FLAGS[] = {
    "bcast", "bell", "compress", "consolidate-segments", "contiguous", "debugger-test", "disable-status",
    "disable-stdout-job-summary", "exact", "exclusive", "external", "get-user-env", "help", "hold",
    "ignore-pbs", "immediate", "interactive", "kill-command", "kill-on-bad-exit", "label", "multi-prog",
    "nice", "no-allocate", "no-bell", "no-kill", "no-requeue", "no-shell", "oom-kill-step", "overcommit",
    "overlap", "oversubscribe", "parsable", "preserve-env", "propagate", "pty", "quiet", "reboot",
    "requeue", "resv-ports", "send-libs", "share", "spread-job", "stepmgr", "test-only", "unbuffered",
    "usage", "use-min-nodes", "verbose", "version", "whole", "x11",
};
/* clang-format on */
static const char SHORT_FLAGS[] = "EHOQVXZhlsuv";
static const char SHORT_OPTIONAL[] = "IKk"; /* -K0: the rest of the word, if any, is the value */

/* getopt accepts an unambiguous beginning of a name. */
static bool begins(const char *name, const char *word, size_t length)
{
    return strlen(name) >= length && strncmp(name, word, length) == 0;
}

static bool is_ours(const char *name, size_t length)
{
    return length >= 2 && begins(JIT_OPTION, name, length); /* one letter is --job-name too */
}

static bool long_wants_value(const char *name, bool sbatch)
{
    size_t length = strlen(name);

    for (size_t i = 0; i < JIT_LENGTH(FLAGS); i++)
        if (begins(FLAGS[i], name, length))
            return false;
    return !(sbatch && strcmp(name, "wait") == 0);
}

/* A cluster like -vN2: a letter that takes a value ends it, and the value may follow at once. */
static bool short_wants_value(const char *letters, bool sbatch)
{
    while (*letters != '\0' && (strchr(SHORT_FLAGS, *letters) != NULL || (sbatch && *letters == 'W')))
        letters++;
    return *letters != '\0' && strchr(SHORT_OPTIONAL, *letters) == NULL && letters[1] == '\0';
}

enum answer { GO_ON, SKIP_NEXT, FOUND, END };

static enum answer judge(const char *word, bool sbatch)
{
    if (word[0] != '-' || word[1] == '\0')
        return END; /* the script or program */
    if (word[1] != '-')
        return short_wants_value(word + 1, sbatch) ? SKIP_NEXT : GO_ON;
    word += 2;
    if (*word == '\0')
        return END;
    if (is_ours(word, strcspn(word, "=")))
        return FOUND;
    return strchr(word, '=') == NULL && long_wants_value(word, sbatch) ? SKIP_NEXT : GO_ON;
}

/* `cmdline`: a file of words that end with a null byte, the first being the command, as in
 * /proc/self/cmdline. False also when it cannot be read. */
bool jit_arguments_given(const char *cmdline)
{
    FILE *file = fopen(cmdline, "re");
    char *word = NULL;
    size_t room = 0;
    enum answer answer = SKIP_NEXT;
    bool sbatch = false;

    if (file == NULL)
        return false;
    if (getdelim(&word, &room, '\0', file) > 0) {
        const char *slash = strrchr(word, '/');

        sbatch = strcmp(slash ? slash + 1 : word, "sbatch") == 0;
        answer = GO_ON;
    }
    while ((answer == GO_ON || answer == SKIP_NEXT) && getdelim(&word, &room, '\0', file) > 0)
        answer = answer == SKIP_NEXT ? GO_ON : judge(word, sbatch);
    free(word);
    (void)fclose(file);
    return answer == FOUND;
}
