/*
 * Turn the argument of `--jit-ckpt` into the canonical text that the job carries, or refuse it with one line.
 *
 * Rule: runs in the user's own command (sbatch, salloc, srun), never in a daemon.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "jit_ckpt.h"

/* Slurm says "no argument" in three ways. */
static const char *argument_or_empty(const char *argument)
{
    return argument == NULL || strcmp(argument, "(null)") == 0 ? "" : argument;
}

int jit_request_take(const char *argument, char *text, size_t size)
{
    struct jit_options *options =
        malloc(sizeof(*options)); /* 40 KB: not for the stack of somebody's process */
    struct jit_why why = {""};
    char cwd[PATH_MAX];
    int rc = -1;

    if (options == NULL || getcwd(cwd, sizeof(cwd)) == NULL) {
        jit_why_set(&why, "cannot find the working directory: %s", strerror(errno));
        goto out;
    }
    if (jit_options_parse(options, argument_or_empty(argument), &why) != 0)
        goto out;
    if (jit_options_anchor(options, cwd, &why) != 0)
        goto out;
    if (jit_directory_prepare(jit_options_dir(options), &why) != 0)
        goto out;
    if (jit_options_format(options, text, size) != 0) {
        jit_why_set(&why, "cannot carry the options: longer than %zu bytes", size - 1);
        goto out;
    }
    rc = 0;
out:
    if (rc != 0)
        slurm_error("jit-ckpt: option: %s", why.text);
    free(options);
    return rc;
}
