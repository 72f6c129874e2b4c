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
 * Slurm's defaults, which sites change. Not for jobs that have the option without asking: a program that
 * knows nothing of jitmpi would hang where the site's settings end it; jit-srun says these things by itself.
 */
static struct jit_setting settings[] = {
    {"SLURM_NO_KILL", "set", false},
    {"SLURM_KILL_BAD_EXIT", "0", false},
    {"SLURM_WAIT", "0", false},
};

static struct jit_site site;
static struct jit_why site_why;
static struct jit_wishes command;
static struct jit_options options;
static struct jit_why without;  /* why an allocation of this srun goes without the option */
static char text[JIT_TEXT_MAX]; /* "" unless this srun itself was given the option in a job without it */
static bool unasked;            /* the site gave it */

static bool is_set(const char *name)
{
    const char *value = getenv(name);

    return value != NULL && value[0] != '\0';
}

static bool job_has_option(void)
{
    return is_set(JIT_ENV_OPTIONS_JOB) && text[0] == '\0';
}

static bool given(void) /* on the command line of this srun */
{
    return command.said[JIT_SAYS_OPTION] && !command.off;
}

/* What a srun that allocates wants, when its command line is silent. */
static enum jit_choice choose(void)
{
    const char *partition = getenv("SLURM_PARTITION");
    enum jit_choice environment = jit_request_of_environment();

    if (command.said[JIT_SAYS_PARTITION])
        partition = command.value[JIT_SAYS_PARTITION];
    if (environment != JIT_UNSAID)
        return environment;
    if (site_why.text[0] == '\0' && jit_site_enables(&site, partition ? partition : ""))
        return JIT_SITE_CHOICE;
    return JIT_UNSAID;
}

static void take_silently(enum jit_choice choice)
{
    if (site_why.text[0] != '\0')
        without = site_why;
    else if (command.heterogeneous)
        jit_why_set(&without, "cannot protect a heterogeneous job");
    else if (jit_request_take(&options, &site, "", choice == JIT_YES, text, sizeof(text), &without) == 0)
        unasked = choice == JIT_SITE_CHOICE;
}

int jit_launcher_init(int count, char *arguments[])
{
    bool asked;

    jit_wishes_of_command(&command, "/proc/self/cmdline");
    if (job_has_option()) {
        asked = !is_set("SLURM_SPANK_" JIT_ENV_UNASKED) || given();
    } else {
        (void)jit_site_load(&site, count, arguments, &site_why);
        if (!command.said[JIT_SAYS_OPTION] && !is_set("SLURM_JOB_ID") && choose() >= JIT_YES)
            take_silently(choose());
        asked = site_why.text[0] == '\0' && (given() || (text[0] != '\0' && !unasked));
    }
    if (asked)
        jit_settings_put(settings, JIT_LENGTH(settings));
    return 0;
}

int jit_launcher_option(const char *argument)
{
    struct jit_why why = {""};

    if (job_has_option() || jit_request_is_off(argument))
        return 0;
    if (is_set("SLURM_JOB_ID") && !given())
        return 0; /* Slurm's note of a job that went without the option */
    if (site_why.text[0] != '\0') {
        without = site_why;
        return 0;
    }
    if (command.heterogeneous)
        jit_why_set(&why, "cannot protect a heterogeneous job: start it without the option");
    else if (jit_request_take(&options, &site, argument, true, text, sizeof(text), &why) == 0)
        return 0;
    slurm_error("jit-ckpt: option: %s", why.text);
    return -1;
}

static int carry(spank_t sp)
{
    spank_err_t error = spank_job_control_setenv(sp, JIT_ENV_OPTIONS, text, 1);

    (void)setenv(JIT_ENV_OPTIONS_JOB, text, 1); /* the step's tasks, and slurmstepd, read it from here */
    if (unasked) {
        (void)setenv("SLURM_SPANK_" JIT_ENV_UNASKED, "1", 1);
        (void)spank_job_control_setenv(sp, JIT_ENV_UNASKED, "1", 1);
    }
    if (error != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: post_opt: cannot store the options with the job: %s", spank_strerror(error));
    return error == ESPANK_SUCCESS ? 0 : -1;
}

int jit_launcher_post_opt(spank_t sp)
{
    jit_settings_take_back(settings, JIT_LENGTH(settings));
    if (job_has_option() && command.said[JIT_SAYS_OPTION])
        slurm_spank_log(
            "jit-ckpt: option: cannot change the options of a running job: those of its submission "
            "stay (%s)",
            getenv(JIT_ENV_OPTIONS_JOB));
    if (without.text[0] != '\0')
        slurm_spank_log("jit-ckpt: %s; this job runs unprotected", without.text);
    without.text[0] = '\0';
    return text[0] == '\0' ? 0 : carry(sp);
}
