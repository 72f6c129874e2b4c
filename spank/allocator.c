/*
 * sbatch and salloc: turn `--jit-ckpt` into what the job carries and how Slurm keeps the job.
 *
 * sbatch calls init, then reads #SBATCH lines (option), SBATCH_* variables and its command line (option), and
 * then calls post_opt. So for `#SBATCH --jit-ckpt` the option is in time to set SBATCH_*, for
 * `sbatch --jit-ckpt` only init is.
 *
 * What the user chose: SBATCH_* that are set stay; `--no-requeue` and the like on the command line win,
 * because Slurm reads it last; in #SBATCH lines they lose against SBATCH_*, and Slurm gives no way to see
 * them here.
 */
#include <stdlib.h>

#include "jit_ckpt.h"

/* "1" would be fatal for no-kill in some versions, and for requeue anything but an empty value. */
static struct jit_setting settings[] = {
    {"SBATCH_NO_KILL", "set", false},
    {"SALLOC_NO_KILL", "set", false},
    {"SBATCH_OPEN_MODE", "append", false},
    {"SBATCH_REQUEUE", "", false}, /* last: left out where the user has SBATCH_NO_REQUEUE */
};

/* What a job with the option leaves in the environment of a nested sbatch: the job's options, and Slurm's own
 * two notes of the option (for later srun). A nested job has the option only if it asks for it. */
static const char *const INHERITED[] = {
    JIT_ENV_OPTIONS,
    JIT_ENV_OPTIONS_JOB,
    JIT_ENV_ATTEMPT,
    JIT_ENV_LAUNCHER,
    "_SLURM_SPANK_OPTION_jit_ckpt_jit_ckpt",
    "SLURM_SPANK__SLURM_SPANK_OPTION_jit_ckpt_jit_ckpt",
};

static char text[JIT_TEXT_MAX]; /* "" until the option was given; given twice, the last one stays */

static void keep_job(void)
{
    size_t count = JIT_LENGTH(settings);

    if (getenv("SBATCH_NO_REQUEUE") != NULL)
        count--;
    jit_settings_put(settings, count);
}

int jit_allocator_init(spank_t sp)
{
    for (size_t i = 0; i < JIT_LENGTH(INHERITED); i++)
        (void)unsetenv(INHERITED[i]);
    (void)spank_job_control_unsetenv(sp, JIT_ENV_OPTIONS);
    if (jit_arguments_given("/proc/self/cmdline"))
        keep_job();
    return 0;
}

int jit_allocator_option(const char *argument)
{
    if (jit_request_take(argument, text, sizeof(text)) != 0)
        return -1;
    keep_job();
    return 0;
}

int jit_allocator_post_opt(spank_t sp)
{
    spank_err_t error;

    jit_settings_take_back(settings, JIT_LENGTH(settings));
    if (text[0] == '\0')
        return 0;
    error = spank_job_control_setenv(sp, JIT_ENV_OPTIONS, text, 1);
    if (error == ESPANK_SUCCESS)
        return 0;
    slurm_error("jit-ckpt: post_opt: cannot store the options with the job: %s", spank_strerror(error));
    return -1;
}
