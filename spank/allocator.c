/*
 * sbatch and salloc: turn `--jit-ckpt`, or the site's wish, into what the job carries and how Slurm keeps the
 * job.
 *
 * sbatch calls init, then reads #SBATCH lines (option), SBATCH_* variables and its command line (option), and
 * then calls post_opt; for a heterogeneous job the last two again for every component. So only init and the
 * option in a #SBATCH line are in time to set SBATCH_*, and init must find out by itself what the user wants.
 *
 * Rule 1: what the user chose stays, in SBATCH_*, #SBATCH lines or on the command line.
 * Rule 2: only a job whose user asked for the option can be refused. Where the site gives the option, or the
 *         site's file is wrong, a job that cannot have it goes without, and one line says so.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jit_ckpt.h"

/* "1" would be fatal for no-kill in some versions, and for requeue anything but an empty value. */
static char warning[32];
enum { NO_KILL, SALLOC_NO_KILL, OPEN_MODE, REQUEUE, SIGNAL };
static struct jit_setting settings[] = {
    [NO_KILL] = {"SBATCH_NO_KILL", "set", false},        [SALLOC_NO_KILL] = {"SALLOC_NO_KILL", "set", false},
    [OPEN_MODE] = {"SBATCH_OPEN_MODE", "append", false}, [REQUEUE] = {"SBATCH_REQUEUE", "", false},
    [SIGNAL] = {"SBATCH_SIGNAL", NULL, false},
};

/* What a job with the option leaves in the environment of a nested sbatch: the job's options, and Slurm's own
 * two notes of the option (for later srun). A nested job has the option only if it asks for it. */
static const char *const INHERITED[] = {
    JIT_ENV_OPTIONS,
    JIT_ENV_OPTIONS_JOB,
    "SLURM_SPANK_" JIT_ENV_UNASKED,
    JIT_ENV_ATTEMPT,
    JIT_ENV_LAUNCHER,
    JIT_ENV_TRAINING,
    JIT_ENV_TASKS,
    "_SLURM_SPANK_OPTION_jit_ckpt_jit_ckpt",
    "SLURM_SPANK__SLURM_SPANK_OPTION_jit_ckpt_jit_ckpt",
};

static struct jit_site site;
static struct jit_why site_why; /* why the site's file cannot be used; "" if it can */
static struct jit_wishes command, script;
static struct jit_why
    without; /* why a job that nobody can refuse goes without the option; "" if it does not */
static struct jit_options options;
static char text[JIT_TEXT_MAX]; /* "" unless the job has the option; given twice, the last one stays */
static bool unasked;            /* it has it because the site enables it */
static bool replaced;           /* the option of a #SBATCH line was passed over */
static bool later;              /* all options have been told */
static int components;          /* of a heterogeneous job, as far as they are read */

static const char ONE_JOB[] = "cannot protect a heterogeneous job: submit it without the option";

/* Nested in a batch script with the option, sbatch must not hand the directory of our srun on. */
static void leave_shim(void)
{
    const char *path = getenv("PATH");
    size_t length = strlen(site.shim_dir);

    if (path != NULL && strncmp(path, site.shim_dir, length) == 0 && path[length] == ':') {
        char *rest = strdup(path + length + 1);

        if (rest != NULL)
            (void)setenv("PATH", rest, 1);
        free(rest);
    }
}

/* The value of an option of Slurm as sbatch will see it: command line, then variable, then #SBATCH line. */
static const char *chosen(enum jit_topic topic, const char *variable)
{
    const char *set = getenv(variable);

    if (command.said[topic])
        return command.value[topic];
    return set != NULL ? set : script.value[topic];
}

static bool is_heterogeneous(void)
{
    return command.heterogeneous || script.heterogeneous || components > 0;
}

static enum jit_choice choose(void)
{
    const char *partition =
        chosen(JIT_SAYS_PARTITION, command.sbatch ? "SBATCH_PARTITION" : "SALLOC_PARTITION");
    enum jit_choice environment = jit_request_of_environment();

    if (command.said[JIT_SAYS_OPTION])
        return command.off ? JIT_NO : JIT_YES;
    if (script.said[JIT_SAYS_OPTION])
        return script.off ? JIT_NO : JIT_YES;
    if (environment != JIT_UNSAID)
        return environment;
    return site_why.text[0] == '\0' && jit_site_enables(&site, partition) ? JIT_SITE_CHOICE : JIT_UNSAID;
}

/* Seconds before the time limit at which the ranks are told to save: what `save` allows them, but not more
 * than WARNING, which most states need only a part of, nor more than a tenth of the job's time. */
enum { WARNING = 120, SHARE = 10 };

static long warning_time(void)
{
    const char *said = command.value[JIT_SAYS_OPTION];
    long seconds = WARNING, limit = jit_seconds(chosen(JIT_SAYS_TIME, "SBATCH_TIMELIMIT"));
    struct jit_why ignored;

    if (!command.said[JIT_SAYS_OPTION])
        said = script.value[JIT_SAYS_OPTION];
    if (jit_request_read(&options, &site, said, &ignored) == 0) {
        const char *save = jit_options_value(&options, "save");

        if (save[0] != '\0' && (long)jit_whole_part(save) < seconds)
            seconds = (long)jit_whole_part(save);
    }
    if (limit > 0 && limit / SHARE < seconds)
        seconds = limit / SHARE;
    return seconds > 0 ? seconds : 1;
}

/* What SBATCH_REQUEUE shall say: sbatch refuses a job that asks for what slurmctld does not allow. The price
 * of an expedited requeue is that a failing script's job is held, so it is for users who asked for the
 * option. */
static const char *requeue_wish(enum jit_choice choice, bool seen)
{
    bool wanted = choice == JIT_YES && command.sbatch && seen && !command.said[JIT_SAYS_REQUEUE] &&
                  jit_site_switch(&site, "expedite", false);

    return wanted && jit_slurm_expedites() ? "expedite" : "";
}

/* Leave alone what the user said in #SBATCH lines. The warning is for jobs whose user asked for the option:
 * it ends programs that do not expect it. Nor is it set where the script cannot be seen. */
static void choose_settings(enum jit_choice choice, bool seen)
{
    if (script.said[JIT_SAYS_NO_KILL])
        settings[NO_KILL].value = NULL;
    if (script.said[JIT_SAYS_OPEN_MODE])
        settings[OPEN_MODE].value = NULL;
    if (script.said[JIT_SAYS_REQUEUE] || getenv("SBATCH_NO_REQUEUE") != NULL)
        settings[REQUEUE].value = NULL;
    else
        settings[REQUEUE].value = requeue_wish(choice, seen);
    if (choice == JIT_YES && command.sbatch && seen && !script.said[JIT_SAYS_SIGNAL]) {
        (void)snprintf(warning, sizeof(warning), "USR1@%ld", warning_time());
        settings[SIGNAL].value = warning;
    }
}

/* The job has the option though no option will come: the site gives it, or the environment. */
static void take_silently(bool by_site)
{
    if (is_heterogeneous())
        jit_why_set(&without, "%s", ONE_JOB);
    else if (jit_request_take(&options, &site, "", !by_site, text, sizeof(text), &without) == 0)
        unasked = by_site;
}

int jit_allocator_init(spank_t sp, int count, char *arguments[])
{
    enum jit_choice choice;
    bool seen;

    (void)jit_site_load(&site, count, arguments, &site_why);
    leave_shim();
    for (size_t i = 0; i < JIT_LENGTH(INHERITED); i++)
        (void)unsetenv(INHERITED[i]);
    (void)spank_job_control_unsetenv(sp, JIT_ENV_OPTIONS);
    (void)spank_job_control_unsetenv(sp, JIT_ENV_UNASKED);
    jit_wishes_of_command(&command, "/proc/self/cmdline");
    seen = !command.sbatch || jit_wishes_of_script(&script, &command);
    choice = choose();
    choose_settings(choice, seen);
    if (choice == JIT_UNSAID || choice == JIT_NO)
        return 0;
    if (site_why.text[0] != '\0') {
        without = site_why;
        return 0;
    }
    if (!command.said[JIT_SAYS_OPTION] && !script.said[JIT_SAYS_OPTION])
        take_silently(choice == JIT_SITE_CHOICE);
    if (without.text[0] == '\0')
        jit_settings_put(settings, JIT_LENGTH(settings));
    return 0;
}

static void go_without(void)
{
    text[0] = '\0';
    without.text[0] = '\0';
    unasked = false;
}

/* The option of a #SBATCH line that another one on the command line replaces, which Slurm tells later. */
static bool is_replaced(const char *argument)
{
    const char *line = script.value[JIT_SAYS_OPTION];

    return command.said[JIT_SAYS_OPTION] && line[0] != '\0' && argument != NULL &&
           strcmp(argument, line) == 0 && strcmp(line, command.value[JIT_SAYS_OPTION]) != 0;
}

int jit_allocator_option(const char *argument)
{
    struct jit_why why = {""};

    if (!later && is_replaced(argument)) { /* it may be unusable, and shall make no directory */
        replaced = true;
        return 0;
    }
    replaced = false;
    if (jit_request_is_off(argument)) {
        go_without();
        if (!command.said[JIT_SAYS_OPTION] || command.off)
            jit_settings_take_back(settings, JIT_LENGTH(settings));
        return 0;
    }
    if (command.said[JIT_SAYS_OPTION] && command.off)
        return 0; /* a #SBATCH line; the command line comes later */
    go_without();
    if (site_why.text[0] != '\0') {
        without = site_why;
        return 0;
    }
    if (is_heterogeneous())
        jit_why_set(&why, "%s", ONE_JOB);
    else if (jit_request_take(&options, &site, argument, true, text, sizeof(text), &why) == 0) {
        jit_settings_put(settings,
                         JIT_LENGTH(settings)); /* done already, unless init could not see the script */
        return 0;
    }
    slurm_error("jit-ckpt: option: %s", why.text);
    return -1;
}

static int carry(spank_t sp)
{
    const char *spares = jit_options_value(&options, "spares");
    spank_err_t error = spank_job_control_setenv(sp, JIT_ENV_OPTIONS, text, 1);

    if (error == ESPANK_SUCCESS && unasked)
        error = spank_job_control_setenv(sp, JIT_ENV_UNASKED, "1", 1);
    if (error != ESPANK_SUCCESS) {
        slurm_error("jit-ckpt: post_opt: cannot store the options with the job: %s", spank_strerror(error));
        return -1;
    }
    if (spares[0] != '\0' && jit_whole_part(spares) > 0 && !jit_site_switch(&site, "adds-spares", false))
        slurm_spank_log(
            "jit-ckpt: spares=%s: so many of the job's nodes are kept aside; ask for them with -N", spares);
    return 0;
}

int jit_allocator_post_opt(spank_t sp)
{
    later = true;
    if (replaced && jit_allocator_option(script.value[JIT_SAYS_OPTION]) != 0)
        return -1; /* what we took for the option on the command line was none */
    jit_settings_take_back(settings, JIT_LENGTH(settings));
    if (++components > 1 && text[0] != '\0') { /* its lines came through a pipe */
        go_without();
        jit_why_set(&without, "%s", ONE_JOB);
        (void)spank_job_control_unsetenv(sp, JIT_ENV_OPTIONS);
    }
    if (without.text[0] != '\0')
        slurm_spank_log("jit-ckpt: %s; this job runs unprotected", without.text);
    without.text[0] = '\0';
    return text[0] == '\0' ? 0 : carry(sp);
}
