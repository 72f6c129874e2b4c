/*
 * Turn the words of a command line into what the user said about the option and about what goes with it.
 *
 * Needed because slurm_spank_init is the last moment at which SBATCH_* still counts, and options of the
 * command line are told to the plugin only later.
 *
 * Rule 1: an option behind the script's or program's name is not ours. Finding that name needs to know which
 *         options stand without a value; others than these are taken to have one, as most of Slurm's do.
 * Rule 2: a wrong guess never refuses a job: the option itself is told by Slurm in the end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jit_ckpt.h"

/* Options of sbatch, salloc and srun (22.05 to 26.05) whose next word is not their value. `wait` and -W take
 * a value in srun and salloc, not in sbatch. */
/* clang-format off */
static const char *const FLAGS[] = {
    "async", "bcast", "bell", "compress", "consolidate-segments", "contiguous", "debugger-test", "disable-status",
    "disable-stdout-job-summary", "exact", "exclusive", "external", "get-user-env", "help", "hold",
    "ignore-pbs", "immediate", "interactive", "kill-command", "kill-on-bad-exit", "label", "multi-prog",
    "nice", "no-allocate", "no-bell", "no-kill", "no-requeue", "no-shell", "oom-kill-step", "overcommit",
    "overlap", "oversubscribe", "parsable", "preserve-env", "propagate", "pty", "quiet", "quit-on-interrupt",
    "reboot", "requeue", "resv-ports", "send-libs", "share", "spread-job", "spread-segments", "stepmgr",
    "test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version", "whole", "x11",
};
/* The same, but not when shortened: the beginnings are others' names. Those of pyxis are there on many sites. */
static const char *const WHOLE_FLAGS[] = {
    "container-entrypoint", "container-entrypoint-log", "container-mount-home", "container-readonly",
    "container-remap-root", "container-writable", "no-container-entrypoint", "no-container-mount-home",
    "no-container-remap-root", "wait-for-children",
};
/* clang-format on */
static const char SHORT_FLAGS[] = "EHOQVXZhlsuv";
static const char SHORT_OPTIONAL[] = "IKk"; /* -K0: the rest of the word, if any, is the value */

/* The options that we want to know of, and the fewest letters that Slurm takes for them. */
static const struct {
    const char *name;
    size_t least;
    enum jit_topic topic;
} KNOWN[] = {
    {JIT_OPTION, 2, JIT_SAYS_OPTION},     {"no-kill", 4, JIT_SAYS_NO_KILL},
    {"no-requeue", 4, JIT_SAYS_REQUEUE},  {"open-mode", 2, JIT_SAYS_OPEN_MODE},
    {"requeue", 3, JIT_SAYS_REQUEUE},     {"signal", 2, JIT_SAYS_SIGNAL},
    {"partition", 4, JIT_SAYS_PARTITION}, {"time", 4, JIT_SAYS_TIME},
    {"wrap", 2, JIT_SAYS_WRAP},
};

/* getopt accepts an unambiguous beginning of a name. */
static bool begins(const char *name, const char *word, size_t length)
{
    return strlen(name) >= length && strncmp(name, word, length) == 0;
}

static enum jit_topic topic_of(const char *name, size_t length)
{
    for (size_t i = 0; i < JIT_LENGTH(KNOWN); i++)
        if (length >= KNOWN[i].least && begins(KNOWN[i].name, name, length))
            return KNOWN[i].topic;
    return JIT_SAYS_OTHER;
}

static bool long_wants_value(const char *name, bool sbatch)
{
    size_t length = strlen(name);

    for (size_t i = 0; i < JIT_LENGTH(FLAGS); i++)
        if (begins(FLAGS[i], name, length))
            return false;
    for (size_t i = 0; i < JIT_LENGTH(WHOLE_FLAGS); i++)
        if (strcmp(WHOLE_FLAGS[i], name) == 0)
            return false;
    return topic_of(name, length) != JIT_SAYS_OPTION && !(sbatch && strcmp(name, "wait") == 0);
}

static void note(struct jit_wishes *wishes, enum jit_topic topic, const char *value)
{
    wishes->said[topic] = true;
    if (topic == JIT_SAYS_OPTION)
        wishes->off = strcmp(value, JIT_OFF) == 0;
    if (topic == JIT_SAYS_OTHER || strlen(value) >= sizeof(wishes->value[topic]))
        value = "";
    memcpy(wishes->value[topic], value, strlen(value) + 1);
}

/* A cluster like -vN2: a letter that takes a value ends it, and the value may follow at once. */
static void take_letters(struct jit_scan *scan, const char *letters)
{
    while (*letters != '\0' && (strchr(SHORT_FLAGS, *letters) != NULL || (scan->sbatch && *letters == 'W')))
        letters++;
    scan->topic = *letters == 'p' ? JIT_SAYS_PARTITION : *letters == 't' ? JIT_SAYS_TIME : JIT_SAYS_OTHER;
    if (*letters == 'k')
        note(scan->wishes, JIT_SAYS_NO_KILL, "");
    if (*letters == '\0' || strchr(SHORT_OPTIONAL, *letters) != NULL)
        return;
    if (letters[1] == '\0')
        scan->waits = true;
    else
        note(scan->wishes, scan->topic, letters + 1);
}

static void take_long(struct jit_scan *scan, const char *name)
{
    const char *equals = strchr(name, '=');

    scan->topic = topic_of(name, equals ? (size_t)(equals - name) : strlen(name));
    if (equals == NULL && long_wants_value(name, scan->sbatch))
        scan->waits = true;
    else
        note(scan->wishes, scan->topic, equals ? equals + 1 : "");
}

/* Take the next word. Behind the end of the options only srun's colons between components count. */
void jit_scan_word(struct jit_scan *scan, const char *word)
{
    struct jit_wishes *wishes = scan->wishes;

    if (scan->waits) {
        note(wishes, scan->topic, word);
        scan->waits = false;
    } else if (scan->ended) {
        if (scan->srun && strcmp(word, ":") == 0)
            wishes->heterogeneous = true;
    } else if (word[0] == '-' && word[1] == '-' && word[2] == '\0') {
        scan->ended = true;
    } else if (word[0] != '-' || word[1] == '\0') { /* the script or program */
        scan->ended = true;
        wishes->heterogeneous = strcmp(word, ":") == 0;
        if (strlen(word) < sizeof(wishes->script))
            memcpy(wishes->script, word, strlen(word) + 1);
    } else if (word[1] == '-') {
        take_long(scan, word + 2);
    } else {
        take_letters(scan, word + 1);
    }
}

/* Read the words of this process. `cmdline`: a file of words that end with a null byte, the first being the
 * command, as in /proc/self/cmdline. Nothing is said when it cannot be read. */
void jit_wishes_of_command(struct jit_wishes *wishes, const char *cmdline)
{
    FILE *file = fopen(cmdline, "re");
    char *word = NULL;
    size_t room = 0;
    struct jit_scan scan = {.wishes = wishes};

    memset(wishes, 0, sizeof(*wishes));
    if (file == NULL)
        return;
    if (getdelim(&word, &room, '\0', file) > 0) {
        const char *slash = strrchr(word, '/'), *name = slash ? slash + 1 : word;

        /* Sites put scripts of their own in front: sbatch.real, .sbatch-wrapped. */
        scan.sbatch = strstr(name, "sbatch") != NULL;
        scan.srun = strstr(name, "srun") != NULL;
        wishes->sbatch = scan.sbatch;
    }
    while (getdelim(&word, &room, '\0', file) > 0)
        jit_scan_word(&scan, word);
    free(word);
    (void)fclose(file);
}
