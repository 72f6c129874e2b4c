/*
 * Names that C, shell and Python share: the C side of slurm_plugin/contract.py.
 *
 * Rule 1: every constant of contract.py is here as JIT_<name> with the same value, and nothing else is;
 *         tests/unit/test_contract.py compares the two.
 * Rule 2: data only.
 */
#ifndef JIT_CONTRACT_H
#define JIT_CONTRACT_H

#define JIT_OPTION "jit-ckpt"
#define JIT_OFF    "off"

#define JIT_ENV_OPTIONS      "JIT_CKPT"
#define JIT_ENV_OPTIONS_JOB  "SLURM_SPANK_JIT_CKPT"
#define JIT_ENV_OPTIONS_HOOK "SPANK_JIT_CKPT"
#define JIT_ENV_WISHES       "SBATCH_JIT_CKPT"
#define JIT_ENV_UNASKED      "JIT_CKPT_UNASKED"
#define JIT_ENV_TASKS        "JIT_CKPT_TASKS"
#define JIT_ENV_ATTEMPT      "JIT_CKPT_ATTEMPT"
#define JIT_ENV_LAUNCHER     "JIT_CKPT_LAUNCHER"
#define JIT_ENV_TRAINING     "JIT_CKPT_TRAINING"

#define JIT_EXIT_COMMITTED 83
#define JIT_EXIT_LOST      84
#define JIT_EXIT_REFUSED   85
#define JIT_EXIT_NODE_BAD  86

#define JIT_MANIFEST       "manifest.json"
#define JIT_CHECKPOINT     "checkpoint.h5"
#define JIT_RANK_FILE      "rank{rank}.h5"
#define JIT_CHECKPOINT_DIR "m{minibatch}-r{attempt}"
#define JIT_CLAIM          "claim-r{attempt}.json"
#define JIT_JOURNAL        "journal.jsonl"

#define JIT_SPOOL "/var/spool/jit-ckpt"
#define JIT_TASKS "tasks"

#define JIT_SITE     "/etc/jit-ckpt.conf"
#define JIT_SHIM_DIR "/usr/lib/jit-ckpt/bin"

/* KEY(name, allowed, kind, least, most); the bounds count for numbers only. */
/* clang-format off */
#define JIT_KEYS(KEY)                                                                                        \
    KEY("dir", "an absolute or relative path without commas; %u is the user, %j the job id", JIT_PATH, 0, 0) \
    KEY("keep", "a whole number from 1 to 1000", JIT_WHOLE, 1, 1000)                                         \
    KEY("requeues", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                                     \
    KEY("relaunches", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                                   \
    KEY("relaunch", "on or off", JIT_SWITCH, 0, 0)                                                           \
    KEY("hang", "off or a number from 2 to 1000", JIT_NUMBER_OR_OFF, 2, 1000)                                \
    KEY("hang-floor", "seconds from 1 to 86400", JIT_NUMBER, 1, 86400)                                       \
    KEY("settle", "seconds from 1 to 3600", JIT_NUMBER, 1, 3600)                                             \
    KEY("save", "seconds from 1 to 86400", JIT_NUMBER, 1, 86400)                                             \
    KEY("spares", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                                       \
    KEY("resume", "the path of a committed checkpoint, without commas", JIT_PATH, 0, 0)

/* Keys of the site's file beside those above. */
#define JIT_SITE_KEYS(KEY)                                                                                   \
    KEY("enable", "on, off, or names of partitions with commas between them", JIT_NAMES, 0, 0)               \
    KEY("default-partition", "the name of a partition", JIT_NAME, 0, 0)                                      \
    KEY("max-keep", "a whole number from 1 to 1000", JIT_WHOLE, 1, 1000)                                     \
    KEY("max-requeues", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                                 \
    KEY("max-spares", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                                   \
    KEY("adds-spares", "on or off", JIT_SWITCH, 0, 0)                                                        \
    KEY("shim", "on or off", JIT_SWITCH, 0, 0)                                                               \
    KEY("expedite", "on or off", JIT_SWITCH, 0, 0)                                                           \
    KEY("python", "an absolute path", JIT_ABSOLUTE, 0, 0)                                                    \
    KEY("checks", "on, off, or names of checks with commas between them", JIT_NAMES, 0, 0)                   \
    KEY("mounts", "absolute paths with commas between them", JIT_PATHS, 0, 0)                                \
    KEY("check-patience", "seconds from 1 to 60", JIT_NUMBER, 1, 60)                                         \
    KEY("checks-dir", "an absolute path", JIT_ABSOLUTE, 0, 0)                                                \
    KEY("drain", "on or off", JIT_SWITCH, 0, 0)                                                              \
    KEY("suspect-threshold", "a whole number from 0 to 1000", JIT_WHOLE, 0, 1000)                            \
    KEY("suspect-half-life", "hours from 1 to 10000", JIT_NUMBER, 1, 10000)                                  \
    KEY("spool-free", "MiB, a whole number from 0 to 1000000", JIT_WHOLE, 0, 1000000)

/* LIMIT(key, limit of the site, value where nobody gives one) */
#define JIT_LIMITS(LIMIT)                 \
    LIMIT("keep", "max-keep", 2)          \
    LIMIT("requeues", "max-requeues", 10) \
    LIMIT("spares", "max-spares", 0)
/* clang-format on */

#endif
