/*
 * What the files of the plugin offer each other.
 *
 *   plugin.c -> allocator.c (sbatch, salloc) | launcher.c (srun) | remote.c (slurmstepd)
 *            -> request.c -> options.c, directory.c      arguments.c, settings.c, spool.c
 *
 * options.c, directory.c, arguments.c, settings.c and spool.c know nothing of Slurm, so that tests can call
 * them. Every function returns 0 or -1 unless it says otherwise, and none ends, stops or blocks its host.
 */
#ifndef JIT_CKPT_H
#define JIT_CKPT_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* All is hidden but what Slurm looks for. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#include "contract.h"

#define JIT_WHY_MAX      2048                 /* a message of one line; longer ones are cut */
#define JIT_TEXT_MAX     (2 * PATH_MAX + 512) /* two paths and the short values */
#define JIT_LENGTH(list) (sizeof(list) / sizeof((list)[0]))

/* Why something failed, as one printable line without a prefix. */
struct jit_why {
    char text[JIT_WHY_MAX];
};

#define JIT_COUNT_KEY(name, allowed, kind, least, most) +1
enum { JIT_KEY_COUNT = 0 JIT_KEYS(JIT_COUNT_KEY) };

/* The values that were given, in the order of JIT_KEYS; "" for those that were not. */
struct jit_options {
    char value[JIT_KEY_COUNT][PATH_MAX];
};

/* One environment variable that steers the Slurm command we run in. */
struct jit_setting {
    const char *name;
    const char *value;
    bool ours; /* we set it, so we take it out again */
};

/* One line of the spool. */
struct jit_ended {
    uint32_t job;
    uint32_t step;
    uint32_t rank;
    int status; /* as wait(2) gives it */
    time_t when;
};

/* options.c */
void jit_why_set(struct jit_why *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
int jit_options_parse(struct jit_options *options, const char *text, struct jit_why *why);
int jit_options_anchor(struct jit_options *options, const char *cwd, struct jit_why *why);
int jit_options_format(const struct jit_options *options, char *text, size_t size);
const char *jit_options_dir(const struct jit_options *options);

/* directory.c */
int jit_directory_prepare(const char *path, struct jit_why *why);

/* arguments.c */
bool jit_arguments_given(const char *cmdline);

/* settings.c */
void jit_settings_put(struct jit_setting *settings, size_t count);
void jit_settings_take_back(struct jit_setting *settings, size_t count);

/* spool.c */
int jit_spool_note(const char *spool, const struct jit_ended *ended, struct jit_why *why);

/* request.c */
int jit_request_take(const char *argument, char *text, size_t size);

/* allocator.c, launcher.c, remote.c: one context each; the hooks of plugin.c come here */
int jit_allocator_init(spank_t sp);
int jit_allocator_option(const char *argument);
int jit_allocator_post_opt(spank_t sp);

int jit_launcher_init(void);
int jit_launcher_option(const char *argument);
int jit_launcher_post_opt(spank_t sp);

int jit_remote_post_opt(spank_t sp);
int jit_remote_task_exit(spank_t sp);

#endif
