/*
 * srun: keep a step alive when one of its tasks dies, in jobs with the option; as an allocator of its own, do
 * what sbatch does.
 *
 * The callback of the option runs again in every srun inside the job, from Slurm's own note in the
 * environment and with the text as the user typed it. The job's canonical text counts there, so a relative
 * path is not read again from another directory.
 */
#include <stdlib.h>

#include "jit_ckpt.h"

/* no-kill: a lost node does not end the step (the job's flag alone does not protect it). The others are
 * Slurm's defaults, which sites change. */
static struct jit_setting settings[] = {
    {"SLURM_NO_KILL", "set", false},
    {"SLURM_KILL_BAD_EXIT", "0", false},
    {"SLURM_WAIT", "0", false},
};

static char text[JIT_TEXT_MAX]; /* "" unless this srun itself was given the option in a job without it */
static bool given;              /* on the command line of this srun */

static bool job_has_option(void)
{
    const char *carried = getenv(JIT_ENV_OPTIONS_JOB);

    return carried != NULL && carried[0] != '\0' && text[0] == '\0';
}

int jit_launcher_init(void)
{
    given = jit_arguments_given("/proc/self/cmdline");
    if (job_has_option() || given)
        jit_settings_put(settings, JIT_LENGTH(settings));
    return 0;
}

int jit_launcher_option(const char *argument)
{
    return job_has_option() ? 0 : jit_request_take(argument, text, sizeof(text));
}

int jit_launcher_post_opt(spank_t sp)
{
    spank_err_t error;

    jit_settings_take_back(settings, JIT_LENGTH(settings));
    if (job_has_option() && given)
        slurm_spank_log(
            "jit-ckpt: option: cannot change the options of a running job: those of its submission "
            "stay (%s)",
            getenv(JIT_ENV_OPTIONS_JOB));
    if (text[0] == '\0')
        return 0;
    (void)setenv(JIT_ENV_OPTIONS_JOB, text, 1); /* the step's tasks, and slurmstepd, read it from here */
    error = spank_job_control_setenv(sp, JIT_ENV_OPTIONS, text, 1);
    if (error != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: post_opt: cannot store the options with the job: %s", spank_strerror(error));
    return error == ESPANK_SUCCESS ? 0 : -1;
}
