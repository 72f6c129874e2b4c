/*
 * Turn the end of one task into one line of <spool>/<job id>/tasks: `<step id> <task rank> <status> <unix
 * time>`.
 *
 * Rule 1: every component is opened relative to the one before and never through a link, and what is ours
 * must belong to us alone, so that no user can steer where root writes. Rule 2: one write(2) a line,
 * appended, so that tasks that end together do not mix.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jit_ckpt.h"

/* Bytes of a file that is full, for jobs with tens of thousands of tasks on a node: the epilog reads no
 * longer ones (LONGEST of slurm_plugin/spool.py), and no user shall fill root's disk. */
enum { FULL = (1 << 20) - 4096 };

enum { AS_FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

/* Close without losing the reason for which we close. */
static void close_quietly(int file)
{
    int reason = errno;

    (void)close(file);
    errno = reason;
}

/* Is it a folder or file of the given type that nobody else can read or write? Sets errno if not. */
static bool is_ours(int file, mode_t type)
{
    struct stat info;

    if (fstat(file, &info) == 0 && (info.st_mode & S_IFMT) == type && info.st_uid == geteuid() &&
        (info.st_mode & 0077) == 0)
        return true;
    errno = EPERM;
    return false;
}

/* Open a folder below `parent` and close `parent`. Made if missing and checked to be ours alone when `ours`.
 */
static int descend(int parent, const char *name, bool ours)
{
    int folder = -1;

    if (!ours || mkdirat(parent, name, 0700) == 0 || errno == EEXIST)
        folder = openat(parent, name, AS_FOLDER);
    close_quietly(parent);
    if (folder >= 0 && ours && !is_ours(folder, S_IFDIR)) {
        close_quietly(folder);
        folder = -1;
    }
    return folder;
}

/* Open the absolute path `spool`, whose last component is ours. */
static int open_spool(const char *spool)
{
    int folder = open("/", AS_FOLDER);
    char name[NAME_MAX + 1];

    while (folder >= 0) {
        size_t length;

        spool += strspn(spool, "/");
        length = strcspn(spool, "/");
        if (length == 0)
            return folder;
        if (length > NAME_MAX) {
            (void)close(folder);
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(name, spool, length);
        name[length] = '\0';
        spool += length;
        folder = descend(folder, name, spool[strspn(spool, "/")] == '\0');
    }
    return -1;
}

/* Open the file of tasks in `folder` and close `folder`. O_NONBLOCK: a FIFO put there must not hold us up. */
static int open_tasks(int folder)
{
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    int file = openat(folder, JIT_TASKS, flags, 0600);

    close_quietly(folder);
    if (file >= 0 && !is_ours(file, S_IFREG)) {
        close_quietly(file);
        file = -1;
    }
    return file;
}

int jit_spool_note(const char *spool, const struct jit_ended *ended, struct jit_why *why)
{
    char line[96], job[16];
    int rc = -1, length, file = -1, folder;
    ssize_t written;

    (void)snprintf(job, sizeof(job), "%" PRIu32, ended->job);
    length = snprintf(line, sizeof(line), "%" PRIu32 " %" PRIu32 " %d %jd\n", ended->step, ended->rank,
                      ended->status, (intmax_t)ended->when);
    folder = open_spool(spool);
    if (folder >= 0)
        folder = descend(folder, job, true);
    if (folder >= 0)
        file = open_tasks(folder);
    if (file < 0) {
        jit_why_set(why, "cannot open '%s/%s/%s': %s", spool, job, JIT_TASKS, strerror(errno));
        return -1;
    }
    written = lseek(file, 0, SEEK_END) < FULL ? write(file, line, (size_t)length) : length;
    if (written == length)
        rc = 0;
    else
        jit_why_set(why, "cannot write to '%s/%s/%s': %s", spool, job, JIT_TASKS,
                    written < 0 ? strerror(errno) : "only a part was written");
    (void)close(file);
    return rc;
}
