/*
 * slurmstepd, as root: give every task the job's options; in the batch script put our srun first in PATH and
 * take the spare nodes out of the job's size; note in the node's spool how each task ended; see that a job
 * does not stay without its jit-srun.
 *
 * Rule 1: returns 0 always: in a batch step anything else would drain the node.
 * Rule 2: does nothing in a job without the option.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "jit_ckpt.h"

static bool options_of_job(spank_t sp, char *text, int size)
{
    return spank_getenv(sp, JIT_ENV_OPTIONS_JOB, text, size) == ESPANK_SUCCESS && text[0] != '\0';
}

static bool is_batch_step(spank_t sp)
{
    uint32_t step;

    return spank_get_item(sp, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT;
}

/* Whether plain srun in the batch script shall be ours. What the job says is only read, whatever it is. */
static bool wants_shim(const struct jit_site *site, const char *text)
{
    static struct jit_options options;
    struct jit_why ignored;
    char srun[PATH_MAX];

    if (!jit_site_switch(site, "shim", true) || jit_options_parse(&options, text, &ignored) != 0 ||
        strcmp(jit_options_value(&options, "relaunch"), JIT_OFF) == 0)
        return false;
    return snprintf(srun, sizeof(srun), "%s/srun", site->shim_dir) < (int)sizeof(srun) &&
           access(srun, X_OK) == 0;
}

static void put_shim(spank_t sp, const char *folder)
{
    static char path[1 << 17], whole[sizeof(path) + PATH_MAX]; /* a variable is never longer than 128 KiB */

    if (spank_getenv(sp, "PATH", path, sizeof(path)) != ESPANK_SUCCESS)
        return; /* without PATH the script names its programs in full */
    (void)snprintf(whole, sizeof(whole), "%s:%s", folder, path);
    if (spank_setenv(sp, "PATH", whole, 1) != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: post_opt: cannot put %s into the PATH of the batch script", folder);
}

/* A count that Slurm gave the job; 0 for none. */
static unsigned long count_of(spank_t sp, const char *name)
{
    char text[32];
    char *end;
    unsigned long count;

    if (spank_getenv(sp, name, text, sizeof(text)) != ESPANK_SUCCESS)
        return 0;
    count = strtoul(text, &end, 10);
    return *end == '\0' ? count : 0;
}

static void set_count(spank_t sp, const char *const names[], unsigned long count)
{
    char text[32];

    (void)snprintf(text, sizeof(text), "%lu", count);
    for (; *names != NULL; names++)
        if (count_of(sp, *names) > 0 && spank_setenv(sp, *names, text, 1) != ESPANK_SUCCESS)
            slurm_error("jit-ckpt: post_opt: cannot set %s for the batch script", *names);
}

/* What the script and its srun take for the job's size is the size without the spare nodes. Where the site
 * added them, it noted the count of the ranks, and Slurm's own count is that or (24.11) the one of all nodes;
 * where the user did, it is that of all nodes. */
static void keep_aside(spank_t sp, unsigned long spares, bool site_added)
{
    static const char *const sizes[] = {"SLURM_NNODES", "SLURM_JOB_NUM_NODES", NULL};
    static const char *const counts[] = {"SLURM_NTASKS", "SLURM_NPROCS", NULL};
    unsigned long nodes = count_of(sp, sizes[0]), tasks = count_of(sp, counts[0]);

    if (spares == 0 || spares >= nodes || (!site_added && tasks % nodes != 0))
        return; /* jit-srun says what is wrong with it */
    set_count(sp, sizes, nodes - spares);
    if (!site_added)
        set_count(sp, counts, tasks / nodes * (nodes - spares));
    else if (count_of(sp, JIT_ENV_TASKS) > 0)
        set_count(sp, counts, count_of(sp, JIT_ENV_TASKS));
}

int jit_remote_post_opt(spank_t sp, int count, char *arguments[])
{
    static struct jit_site site;
    static struct jit_options options;
    struct jit_why why = {""};
    char text[JIT_TEXT_MAX];

    if (!options_of_job(sp, text, sizeof(text)))
        return 0;
    if (spank_setenv(sp, JIT_ENV_OPTIONS, text, 1) != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: post_opt: cannot set %s for the tasks", JIT_ENV_OPTIONS);
    if (!is_batch_step(sp))
        return 0;
    if (jit_site_load(&site, count, arguments, &why) != 0)
        slurm_error("jit-ckpt: post_opt: %s; srun is not taken over", why.text);
    else if (wants_shim(&site, text))
        put_shim(sp, site.shim_dir);
    if (jit_options_parse(&options, text, &why) == 0)
        keep_aside(sp, strtoul(jit_options_value(&options, "spares"), NULL, 10),
                   jit_site_switch(&site, "adds-spares", false));
    return 0;
}

/* How Slurm addresses the job: the number of an array would mean all its tasks. */
static bool name_of_job(spank_t sp, uint32_t number, char *name, size_t size)
{
    uint32_t array = 0, task = 0;

    if (spank_get_item(sp, S_JOB_ARRAY_ID, &array) != ESPANK_SUCCESS ||
        spank_get_item(sp, S_JOB_ARRAY_TASK_ID, &task) != ESPANK_SUCCESS)
        return false;
    if (array != 0 && array != NO_VAL && task != NO_VAL)
        (void)snprintf(name, size, "%" PRIu32 "_%" PRIu32, array, task);
    else
        (void)snprintf(name, size, "%" PRIu32, number);
    return true;
}

/* Where the job's jit-srun is: "host:port:key" without the last two. */
static bool host_of_launcher(spank_t sp, char *host, int size)
{
    char *colon;

    if (spank_getenv(sp, JIT_ENV_LAUNCHER, host, size) != ESPANK_SUCCESS)
        return false;
    for (int times = 0; times < 2; times++) {
        colon = strrchr(host, ':');
        if (colon == NULL)
            return false;
        *colon = '\0';
    }
    return true;
}

/* A task has failed. If its jit-srun is dead with its node, the job would run on without a script, and nobody
 * would see to it. A few nodes are enough to look; a step's tasks end together. */
static void see_to_orphan(spank_t sp, const struct jit_ended *ended, const char *options, int count,
                          char *arguments[])
{
    enum { NODES = 8, PAUSE = 10 };
    static struct jit_site site;
    static struct jit_orphan orphan;
    static time_t last;
    struct jit_why why = {""};
    uint32_t node;

    if (ended->when < last + PAUSE || spank_get_item(sp, S_JOB_NODEID, &node) != ESPANK_SUCCESS ||
        node >= NODES || !host_of_launcher(sp, orphan.host, sizeof(orphan.host)))
        return;
    last = ended->when;
    (void)snprintf(orphan.restarts, sizeof(orphan.restarts), "%lu", count_of(sp, "SLURM_RESTART_COUNT"));
    (void)snprintf(orphan.options, sizeof(orphan.options), "%s", options);
    if (jit_site_load(&site, count, arguments, &why) != 0)
        slurm_error("jit-ckpt: task_exit: %s", why.text);
    else if (snprintf(orphan.program, sizeof(orphan.program), "%s/../orphan", site.shim_dir) >=
                 (int)sizeof(orphan.program) ||
             spank_getenv(sp, "SLURM_JOB_NODELIST", orphan.nodes, sizeof(orphan.nodes)) != ESPANK_SUCCESS ||
             spank_get_item(sp, S_JOB_UID, &orphan.uid) != ESPANK_SUCCESS ||
             spank_get_item(sp, S_JOB_GID, &orphan.gid) != ESPANK_SUCCESS ||
             !name_of_job(sp, ended->job, orphan.job, sizeof(orphan.job)))
        slurm_error("jit-ckpt: task_exit: cannot read the job's owner and nodes from Slurm");
    else if (jit_orphan_start(&orphan, &why) != 0)
        slurm_info("jit-ckpt: task_exit: %s", why.text); /* the node's log: the job is not hurt */
}

int jit_remote_task_exit(spank_t sp, int count, char *arguments[])
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
    else {
        if (ended.step != SLURM_BATCH_SCRIPT && ended.status != 0)
            see_to_orphan(sp, &ended, text, count, arguments);
        if (jit_spool_note(JIT_SPOOL, &ended, &why) == 0)
            return 0;
    }
    if (!said)
        slurm_error("jit-ckpt: task_exit: %s", why.text);
    said = true;
    return 0;
}
