/*
 * Turn what the site, the environment and the command line say into the canonical text that the job carries.
 *
 * Layers, key by key: the site's file, then SBATCH_JIT_CKPT, then the argument of `--jit-ckpt`.
 *
 * Rule: runs in the user's own command (sbatch, salloc, srun), never in a daemon.
 */
#include <errno.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "jit_ckpt.h"

/* Slurm says "no argument" in three ways. */
static const char *argument_or_empty(const char *argument)
{
    return argument == NULL || strcmp(argument, "(null)") == 0 ? "" : argument;
}

bool jit_request_is_off(const char *argument)
{
    return strcmp(argument_or_empty(argument), JIT_OFF) == 0;
}

/* What SBATCH_JIT_CKPT says: as Slurm's own SBATCH_* variables, set means given. */
enum jit_choice jit_request_of_environment(void)
{
    const char *text = getenv(JIT_ENV_WISHES);

    if (text == NULL)
        return JIT_UNSAID;
    return strcmp(text, JIT_OFF) == 0 ? JIT_NO : JIT_YES;
}

/* Read the layers for this argument of the option, without touching what `dir` means. */
int jit_request_read(struct jit_options *options, const struct jit_site *site, const char *argument,
                     struct jit_why *why)
{
    static struct jit_options below; /* 45 KB: not for the stack of somebody's process */
    struct jit_why inner = {""};

    if (jit_options_parse(options, argument_or_empty(argument), why) != 0)
        return -1;
    if (jit_request_of_environment() == JIT_YES) {
        if (jit_options_parse(&below, getenv(JIT_ENV_WISHES), &inner) != 0) {
            jit_why_set(why, "%s: %s", JIT_ENV_WISHES, inner.text);
            return -1;
        }
        jit_options_fill(options, &below);
    }
    if (jit_site_limit(site, options, why) != 0)
        return -1;
    jit_site_fill(site, options);
    return 0;
}

static int expand_user(struct jit_options *options, struct jit_why *why)
{
    const struct passwd *user;

    if (strstr(jit_options_value(options, "dir"), "%u") == NULL)
        return 0;
    user = getpwuid(geteuid());
    if (user != NULL)
        return jit_options_expand(options, user->pw_name, why);
    jit_why_set(why, "cannot use key 'dir': user id %u has no name", (unsigned)geteuid());
    return -1;
}

/* Write the text for this argument of the option; `make`: make the directory too, or only look at it. */
int jit_request_take(struct jit_options *options, const struct jit_site *site, const char *argument,
                     bool make, char *text, size_t size, struct jit_why *why)
{
    char cwd[PATH_MAX];

    if (getcwd(cwd, sizeof(cwd)) == NULL) {
        jit_why_set(why, "cannot find the working directory: %s", strerror(errno));
        return -1;
    }
    if (jit_request_read(options, site, argument, why) != 0 || expand_user(options, why) != 0 ||
        jit_options_anchor(options, cwd, why) != 0 ||
        jit_directory_prepare(jit_options_value(options, "dir"), make, why) != 0)
        return -1;
    if (jit_options_format(options, text, size) == 0)
        return 0;
    text[0] = '\0';
    jit_why_set(why, "cannot carry the options: longer than %zu bytes", size - 1);
    return -1;
}
