/*
 * Start the program that sees to a job whose jit-srun is dead with its node; where it is alive that one ends
 * at once.
 *
 * Rule 1: it runs as the job's owner: all that it is told but the ids is the job's word. Rule 2: nobody waits
 * for it: setsid forks and ends at once. Rule 3: it has an environment of its own and no file of ours.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "jit_ckpt.h"

#define SETSID  "/usr/bin/setsid"
#define SETPRIV "/usr/bin/setpriv"

/* Not all files of slurmstepd are closed on exec (seen on 22.05: a socket), and the owner can reach into a
 * process of his own. posix_spawn does not mind a file that is closed already. */
static int close_ours(posix_spawn_file_actions_t *files)
{
    DIR *list = opendir("/proc/self/fd");
    const struct dirent *entry;
    int error = list == NULL ? errno : 0;

    while (error == 0 && (entry = readdir(list)) != NULL) {
        long file = strtol(entry->d_name, NULL, 10); /* 0 for the folder itself and its parent */

        if (file > 2)
            error = posix_spawn_file_actions_addclose(files, (int)file);
    }
    if (list != NULL)
        (void)closedir(list);
    return error;
}

/* slurmstepd blocks signals, which the program would inherit; its standard files are the task's. */
static int start(pid_t *child, char *const line[], char *const environment[])
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    int error;

    (void)sigemptyset(&none);
    (void)sigfillset(&all);
    (void)posix_spawn_file_actions_init(&files);
    (void)posix_spawnattr_init(&attributes);
    error = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    if (error == 0)
        error = posix_spawnattr_setsigmask(&attributes, &none);
    if (error == 0)
        error = posix_spawnattr_setsigdefault(&attributes, &all);
    for (int file = 0; file <= 2 && error == 0; file++)
        error = posix_spawn_file_actions_addopen(&files, file, "/dev/null", O_RDWR, 0);
    if (error == 0)
        error = close_ours(&files);
    if (error == 0)
        error = posix_spawn(child, SETSID, &files, &attributes, line, environment);
    (void)posix_spawnattr_destroy(&attributes);
    (void)posix_spawn_file_actions_destroy(&files);
    return error;
}

int jit_orphan_start(struct jit_orphan *orphan, struct jit_why *why)
{
    static char setsid_name[] = SETSID, fork_it[] = "--fork", setpriv_name[] = SETPRIV, end[] = "--";
    static char no_groups[] = "--clear-groups", path[] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
    static char conf[PATH_MAX + sizeof("SLURM_CONF=")];
    const char *given = getenv("SLURM_CONF");
    char uid[32], gid[32];
    char *const line[] = {setsid_name,  fork_it,       setpriv_name,    uid,         gid,
                          no_groups,    end,           orphan->program, orphan->job, orphan->restarts,
                          orphan->host, orphan->nodes, orphan->options, NULL};
    char *const environment[] = {path, given != NULL ? conf : NULL, NULL};
    int error, ignored;
    pid_t child;

    (void)snprintf(uid, sizeof(uid), "--reuid=%ju", (uintmax_t)orphan->uid);
    (void)snprintf(gid, sizeof(gid), "--regid=%ju", (uintmax_t)orphan->gid);
    (void)snprintf(conf, sizeof(conf), "SLURM_CONF=%.*s", PATH_MAX, given != NULL ? given : "");
    error = access(orphan->program, X_OK) == 0 ? start(&child, line, environment) : errno;
    if (error != 0) {
        jit_why_set(why, "cannot start '%s': %s", orphan->program, strerror(error));
        return -1;
    }
    while (waitpid(child, &ignored, 0) < 0 && errno == EINTR)
        ;
    return 0;
}
