/*
 * Turn the path of `dir` into a directory that this user can write to, or into the reason why not.
 *
 * Rule: runs as the user who submits, never as root for somebody else. Only the last component is made
 * (0700), so that a mistyped path does not grow a tree.
 */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jit_ckpt.h"

static int refuse(struct jit_why *why, const char *verb, const char *path, int reason)
{
    jit_why_set(why,
                "cannot %s directory '%s': %s; key 'dir' allows: a path that exists or can be made, writable",
                verb, path, strerror(reason));
    return -1;
}

int jit_directory_prepare(const char *path, struct jit_why *why)
{
    struct stat info;

    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return refuse(why, "create", path, errno);
    if (stat(path, &info) != 0)
        return refuse(why, "use", path, errno);
    if (!S_ISDIR(info.st_mode))
        return refuse(why, "use", path, ENOTDIR);
    if (access(path, R_OK | W_OK | X_OK) != 0)
        return refuse(why, "write to", path, errno);
    return 0;
}
