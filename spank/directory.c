/*
 * Turn the path of `dir` into a directory that this user can write to, or into the reason why not.
 *
 * Rule 1: runs as the user who submits, never as root for somebody else. Only the last component is made
 *         (0700), so that a mistyped path does not grow a tree.
 * Rule 2: from the component with %j on, the path is the job's own: the job makes it.
 */
#include <errno.h>
#include <stdio.h>
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

/* Cut the last component off, and the slashes before it. */
static void to_parent(char *path)
{
    size_t length = strlen(path);

    while (length > 1 && path[length - 1] == '/')
        length--;
    while (length > 0 && path[length - 1] != '/')
        length--;
    while (length > 1 && path[length - 1] == '/')
        length--;
    path[length] = '\0';
}

/* `make`: make it if it is missing; else look whether it could be made. */
int jit_directory_prepare(const char *given, bool make, struct jit_why *why)
{
    char path[PATH_MAX];
    struct stat info;
    char *job;

    if (snprintf(path, sizeof(path), "%s", given) >= (int)sizeof(path))
        return refuse(why, "use", given, ENAMETOOLONG);
    job = strstr(path, "%j");
    if (job != NULL) {
        job[1] = '\0'; /* what is behind it in the same component does not matter */
        to_parent(path);
    }
    if (make && mkdir(path, 0700) != 0 && errno != EEXIST)
        return refuse(why, "create", path, errno);
    if (!make && stat(path, &info) != 0 && errno == ENOENT)
        to_parent(path);
    if (stat(path, &info) != 0)
        return refuse(why, "use", path, errno);
    if (!S_ISDIR(info.st_mode))
        return refuse(why, "use", path, ENOTDIR);
    if (access(path, R_OK | W_OK | X_OK) != 0)
        return refuse(why, "write to", path, errno);
    return 0;
}
