/*
 * Turn the text `key=value,...` into values, and values into the canonical text that the job carries.
 *
 * Rule 1: accepts exactly what slurm_plugin.contract.parse_options accepts, except that `dir` may be missing
 *         here: jit_options_anchor adds it. tests/spank/test_options.py compares the two on random input.
 * Rule 2: no I/O, no Slurm.
 */
#include <stdio.h>
#include <string.h>

#include "jit_ckpt.h"

#define TABLE_ROW(name, allowed, kind, least, most) {name, allowed, kind, least, most},
const struct jit_key JIT_OPTION_KEYS[JIT_KEY_COUNT] = {JIT_KEYS(TABLE_ROW)};

#define NAME_AND_COMMA(name, allowed, kind, least, most) ", " name
static const char NAMES[] = "" JIT_KEYS(NAME_AND_COMMA); /* begins with a comma and a space */

/* Take one `key=value` of `length` bytes. */
static int take_item(struct jit_options *options, const char *item, size_t length, struct jit_why *why)
{
    const char *equals = memchr(item, '=', length);
    size_t name = equals ? (size_t)(equals - item) : length;
    size_t size = equals ? length - name - 1 : 0;
    int k = jit_key_find(JIT_OPTION_KEYS, JIT_KEY_COUNT, item, name);

    if (k < 0) {
        jit_why_set(why, "cannot use key '%.*s': unknown; allowed keys: %s", (int)name, item, NAMES + 2);
        return -1;
    }
    return jit_key_take(&JIT_OPTION_KEYS[k], equals ? equals + 1 : "", size, options->value[k], why);
}

/* Read `key=value,...`; empty items are skipped, and of a key given twice the last value counts. */
int jit_options_parse(struct jit_options *options, const char *text, struct jit_why *why)
{
    memset(options, 0, sizeof(*options));
    while (*text != '\0') {
        size_t length = strcspn(text, ",");

        if (length > INT_MAX) {
            jit_why_set(why, "cannot use an item of %zu bytes: too long", length);
            return -1;
        }
        if (length > 0 && take_item(options, text, length, why) != 0)
            return -1;
        text += length;
        if (*text == ',')
            text++;
    }
    return 0;
}

/* Take what `below` has and `options` does not. */
void jit_options_fill(struct jit_options *options, const struct jit_options *below)
{
    for (int k = 0; k < JIT_KEY_COUNT; k++)
        if (options->value[k][0] == '\0')
            memcpy(options->value[k], below->value[k], strlen(below->value[k]) + 1);
}

static int too_long(int k, struct jit_why *why)
{
    jit_why_set(why, "cannot use key '%s': path longer than %d bytes", JIT_OPTION_KEYS[k].name, PATH_MAX - 1);
    return -1;
}

/* Put the user's name for every %u of the directory. %j stays: the job's id is known in the job only. */
int jit_options_expand(struct jit_options *options, const char *user, struct jit_why *why)
{
    char whole[PATH_MAX];
    size_t used = 0, length = strlen(user);
    char *path = options->value[JIT_KEY_DIR];

    for (const char *c = path; *c != '\0'; c++) {
        bool name = c[0] == '%' && c[1] == 'u';

        if (used + (name ? length : 1) >= sizeof(whole))
            return too_long(JIT_KEY_DIR, why);
        memcpy(whole + used, name ? user : c, name ? length : 1);
        used += name ? length : 1;
        c += name ? 1 : 0;
    }
    memcpy(path, whole, used);
    path[used] = '\0';
    return 0;
}

/* Put `cwd` before a relative path. */
static int anchor(int k, char *path, const char *cwd, struct jit_why *why)
{
    char whole[PATH_MAX];
    int length;

    if (path[0] == '\0' || path[0] == '/')
        return 0;
    length = snprintf(whole, sizeof(whole), "%s/%s", strcmp(cwd, "/") == 0 ? "" : cwd, path);
    if (length < 0 || (size_t)length >= sizeof(whole))
        return too_long(k, why);
    if (!jit_is_path(whole)) { /* the working directory is to blame */
        jit_why_set(why, "cannot use key '%s' with value '%s'; allowed: %s", JIT_OPTION_KEYS[k].name, whole,
                    JIT_OPTION_KEYS[k].allowed);
        return -1;
    }
    memcpy(path, whole, (size_t)length + 1);
    return 0;
}

/* Make the paths absolute and put the default, <cwd>/jit-ckpt, where no directory was given. */
int jit_options_anchor(struct jit_options *options, const char *cwd, struct jit_why *why)
{
    if (options->value[JIT_KEY_DIR][0] == '\0')
        memcpy(options->value[JIT_KEY_DIR], JIT_OPTION, sizeof(JIT_OPTION));
    if (anchor(JIT_KEY_DIR, options->value[JIT_KEY_DIR], cwd, why) != 0)
        return -1;
    return anchor(JIT_KEY_RESUME, options->value[JIT_KEY_RESUME], cwd, why);
}

/* Write the canonical text: the given keys in the order of the table. Defaults stay out: Python knows them.
 */
int jit_options_format(const struct jit_options *options, char *text, size_t size)
{
    size_t used = 0;

    text[0] = '\0';
    for (int k = 0; k < JIT_KEY_COUNT; k++) {
        int length;

        if (options->value[k][0] == '\0')
            continue;
        length = snprintf(text + used, size - used, "%s%s=%s", used ? "," : "", JIT_OPTION_KEYS[k].name,
                          options->value[k]);
        if (length < 0 || (size_t)length >= size - used)
            return -1;
        used += (size_t)length;
    }
    return 0;
}

/* The value of a key by its name; "" if it has none. */
const char *jit_options_value(const struct jit_options *options, const char *name)
{
    int k = jit_key_find(JIT_OPTION_KEYS, JIT_KEY_COUNT, name, strlen(name));

    return k < 0 ? "" : options->value[k];
}
