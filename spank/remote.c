/*
 * slurmstepd, as root: give every task the job's options, and note in the node's spool how each task ended.
 *
 * Rule 1: returns 0 always: in a batch step anything else would drain the node.
 * Rule 2: does nothing in a job without the option.
 */
#include <string.h>

#include "jit_ckpt.h"

static bool options_of_job(spank_t sp, char *text, int size)
{
    return spank_getenv(sp, JIT_ENV_OPTIONS_JOB, text, size) == ESPANK_SUCCESS && text[0] != '\0';
}

int jit_remote_post_opt(spank_t sp)
{
    char text[JIT_TEXT_MAX];

    if (options_of_job(sp, text, sizeof(text)) &&
        spank_setenv(sp, JIT_ENV_OPTIONS, text, 1) != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: post_opt: cannot set %s for the tasks", JIT_ENV_OPTIONS);
    return 0;
}

int jit_remote_task_exit(spank_t sp)
{
    static bool said; /* once a step is enough: a node with a full disk has many tasks */
    struct jit_ended ended = {.when = time(NULL)};
    struct jit_why why = {""};
    char text[JIT_TEXT_MAX];

    if (!options_of_job(sp, text, sizeof(text)))
        return 0;
    if (spank_get_item(sp, S_JOB_ID, &ended.job) != ESPANK_SUCCESS ||
        spank_get_item(sp, S_JOB_STEPID, &ended.step) != ESPANK_SUCCESS ||
        spank_get_item(sp, S_TASK_GLOBAL_ID, &ended.rank) != ESPANK_SUCCESS ||
        spank_get_item(sp, S_TASK_EXIT_STATUS, &ended.status) != ESPANK_SUCCESS)
        jit_why_set(&why, "cannot read the task's end from Slurm");
    else if (jit_spool_note(JIT_SPOOL, &ended, &why) == 0)
        return 0;
    if (!said)
        slurm_error("jit-ckpt: task_exit: %s", why.text);
    said = true;
    return 0;
}
