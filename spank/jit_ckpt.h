/*
 * What the files of the plugin offer each other.
 *
 *   plugin.c -> allocator.c (sbatch, salloc) | launcher.c (srun) | remote.c (slurmstepd)
 *            -> request.c -> site.c, options.c -> keys.c     directory.c, settings.c, spool.c, expedite.c,
 *               orphan.c
 *            -> script.c -> arguments.c
 *
 * Only plugin.c, the context files, request.c and expedite.c know of Slurm, so that tests can call the
 * others. Every function returns 0 or -1 unless it says otherwise, and none ends, stops or blocks its host.
 */
#ifndef JIT_CKPT_H
#define JIT_CKPT_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
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

enum jit_kind {
    JIT_PATH,
    JIT_ABSOLUTE,
    JIT_PATHS,
    JIT_SWITCH,
    JIT_NAME,
    JIT_NAMES,
    JIT_WHOLE,
    JIT_NUMBER,
    JIT_NUMBER_OR_OFF,
};

/* One row of JIT_KEYS or JIT_SITE_KEYS. */
struct jit_key {
    const char *name;
    const char *allowed;
    enum jit_kind kind;
    uint32_t least;
    uint32_t most;
};

#define JIT_COUNT_KEY(name, allowed, kind, least, most) +1
enum { JIT_KEY_COUNT = 0 JIT_KEYS(JIT_COUNT_KEY), JIT_SITE_KEY_COUNT = 0 JIT_SITE_KEYS(JIT_COUNT_KEY) };
enum { JIT_KEY_DIR = 0, JIT_KEY_RESUME = JIT_KEY_COUNT - 1 };

/* The values that were given, in the order of JIT_KEYS; "" for those that were not. */
struct jit_options {
    char value[JIT_KEY_COUNT][PATH_MAX];
};

/* What the administrator decided: defaults of the option, and values in the order of JIT_SITE_KEYS. */
struct jit_site {
    struct jit_options options;
    char value[JIT_SITE_KEY_COUNT][PATH_MAX];
    const char *shim_dir;
};

/* What a user can say on a command line or in #SBATCH lines and we want to know. */
enum jit_topic {
    JIT_SAYS_OTHER,
    JIT_SAYS_OPTION,
    JIT_SAYS_NO_KILL,
    JIT_SAYS_REQUEUE,
    JIT_SAYS_OPEN_MODE,
    JIT_SAYS_SIGNAL,
    JIT_SAYS_PARTITION,
    JIT_SAYS_TIME,
    JIT_SAYS_WRAP,
    JIT_TOPICS,
};

struct jit_wishes {
    bool said[JIT_TOPICS];
    char value[JIT_TOPICS][1024]; /* "" where there is none, or a longer one */
    bool off;                     /* the last --jit-ckpt was `off` */
    bool sbatch;                  /* this is sbatch */
    bool heterogeneous;
    char script[PATH_MAX]; /* the first word that is no option: script or program; "" for none */
};

/* The state between two words. */
struct jit_scan {
    struct jit_wishes *wishes;
    bool sbatch, srun;
    bool waits; /* the next word is the value of an option on `topic` */
    bool ended;
    enum jit_topic topic;
};

/* Whether a job shall have the option. */
enum jit_choice { JIT_UNSAID, JIT_NO, JIT_YES, JIT_SITE_CHOICE };

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

/* A job that nobody may see to any more, and the program that looks; its words in their order. */
struct jit_orphan {
    char program[PATH_MAX];
    char job[32]; /* "123", or "100_7" for a task of an array */
    char restarts[32];
    char host[256]; /* of its jit-srun */
    char nodes[JIT_TEXT_MAX];
    char options[JIT_TEXT_MAX];
    uid_t uid; /* of the owner */
    gid_t gid;
};

/* keys.c */
void jit_why_set(struct jit_why *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
int jit_key_find(const struct jit_key *keys, int count, const char *name, size_t length);
int jit_key_take(const struct jit_key *key, const char *value, size_t length, char *to, struct jit_why *why);
bool jit_list_next(const char **list, const char **item, size_t *length);
bool jit_is_path(const char *text);
uint32_t jit_whole_part(const char *value);

/* options.c */
extern const struct jit_key JIT_OPTION_KEYS[JIT_KEY_COUNT];
int jit_options_parse(struct jit_options *options, const char *text, struct jit_why *why);
void jit_options_fill(struct jit_options *options, const struct jit_options *below);
int jit_options_expand(struct jit_options *options, const char *user, struct jit_why *why);
int jit_options_anchor(struct jit_options *options, const char *cwd, struct jit_why *why);
int jit_options_format(const struct jit_options *options, char *text, size_t size);
const char *jit_options_value(const struct jit_options *options, const char *name);

/* site.c */
int jit_site_parse(struct jit_site *site, const char *text, size_t size, const char *path,
                   struct jit_why *why);
int jit_site_load(struct jit_site *site, int count, char *arguments[], struct jit_why *why);
bool jit_site_switch(const struct jit_site *site, const char *name, bool usual);
bool jit_site_enables(const struct jit_site *site, const char *partitions);
int jit_site_limit(const struct jit_site *site, const struct jit_options *asked, struct jit_why *why);
void jit_site_fill(const struct jit_site *site, struct jit_options *options);

/* directory.c */
int jit_directory_prepare(const char *given, bool make, struct jit_why *why);

/* arguments.c */
void jit_scan_word(struct jit_scan *scan, const char *word);
void jit_wishes_of_command(struct jit_wishes *wishes, const char *cmdline);

/* script.c */
void jit_wishes_of_text(struct jit_wishes *wishes, char *text);
bool jit_wishes_of_script(struct jit_wishes *wishes, const struct jit_wishes *command);
long jit_seconds(const char *text);

/* settings.c */
void jit_settings_put(struct jit_setting *settings, size_t count);
void jit_settings_take_back(struct jit_setting *settings, size_t count);

/* expedite.c */
bool jit_slurm_expedites(void);

/* spool.c */
int jit_spool_note(const char *spool, const struct jit_ended *ended, struct jit_why *why);

/* orphan.c */
int jit_orphan_start(struct jit_orphan *orphan, struct jit_why *why);

/* request.c */
bool jit_request_is_off(const char *argument);
enum jit_choice jit_request_of_environment(void);
int jit_request_read(struct jit_options *options, const struct jit_site *site, const char *argument,
                     struct jit_why *why);
int jit_request_take(struct jit_options *options, const struct jit_site *site, const char *argument,
                     bool make, char *text, size_t size, struct jit_why *why);

/* allocator.c, launcher.c, remote.c: one context each; the hooks of plugin.c come here */
int jit_allocator_init(spank_t sp, int count, char *arguments[]);
int jit_allocator_option(const char *argument);
int jit_allocator_post_opt(spank_t sp);

int jit_launcher_init(int count, char *arguments[]);
int jit_launcher_option(const char *argument);
int jit_launcher_post_opt(spank_t sp);

int jit_remote_post_opt(spank_t sp, int count, char *arguments[]);
int jit_remote_task_exit(spank_t sp, int count, char *arguments[]);

#endif
