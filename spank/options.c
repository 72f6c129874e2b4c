/*
 * Turn the text `key=value,...` into values, and values into the canonical text that the job carries.
 *
 * Rule 1: accepts exactly what slurm_plugin.contract.parse_options accepts, except that `dir` may be missing
 *         here: jit_options_anchor adds it. tests/spank/test_options.py compares the two on random input.
 * Rule 2: no I/O, no Slurm, no locale (strtod reads the locale's decimal point, so it is not used).
 */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "jit_ckpt.h"

enum kind { JIT_PATH, JIT_WHOLE, JIT_SWITCH, JIT_NUMBER, JIT_NUMBER_OR_OFF };

struct key {
    const char *name;
    const char *allowed;
    enum kind kind;
    uint32_t least;
    uint32_t most;
};

#define TABLE_ROW(name, allowed, kind, least, most) {name, allowed, kind, least, most},
static const struct key KEYS[JIT_KEY_COUNT] = {JIT_KEYS(TABLE_ROW)};

#define NAME_AND_COMMA(name, allowed, kind, least, most) ", " name
static const char NAMES[] = "" JIT_KEYS(NAME_AND_COMMA); /* begins with a comma and a space */

enum { DIR = 0, RESUME = JIT_KEY_COUNT - 1, DIGITS = 9 };
static const uint64_t SCALE = 1000000000; /* ten to the DIGITS: numbers are compared in billionths */

static bool is_control(char c)
{
    return (unsigned char)c < 0x20 || c == 0x7f;
}

/* Say why, on one line whatever the user typed. */
void jit_why_set(struct jit_why *why, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    if (vsnprintf(why->text, sizeof(why->text), format, arguments) < 0)
        why->text[0] = '\0';
    va_end(arguments);
    for (char *c = why->text; *c != '\0'; c++)
        if (is_control(*c))
            *c = '?';
}

/* Read up to DIGITS digits; return how many there were. */
static int read_digits(const char *text, uint64_t *number)
{
    int count = 0;

    *number = 0;
    while (count < DIGITS && text[count] >= '0' && text[count] <= '9')
        *number = *number * 10 + (uint64_t)(text[count++] - '0');
    return count;
}

/* Is it `digits` or (unless whole) `digits.digits`, from least to most? */
static bool is_number(const struct key *key, const char *text)
{
    uint64_t whole, part = 0;
    int count = read_digits(text, &whole);

    if (count == 0)
        return false;
    text += count;
    if (*text == '.' && key->kind != JIT_WHOLE) {
        count = read_digits(++text, &part);
        if (count == 0)
            return false;
        text += count;
        for (; count < DIGITS; count++)
            part *= 10;
    }
    if (*text != '\0')
        return false;
    whole = whole * SCALE + part;
    return whole >= key->least * SCALE && whole <= key->most * SCALE;
}

static bool is_path(const char *text)
{
    for (; *text != '\0'; text++)
        if (is_control(*text) || *text == ',')
            return false;
    return true;
}

static bool is_allowed(const struct key *key, const char *text)
{
    switch (key->kind) {
    case JIT_PATH:
        return is_path(text);
    case JIT_SWITCH:
        return strcmp(text, "on") == 0 || strcmp(text, "off") == 0;
    case JIT_NUMBER_OR_OFF:
        return strcmp(text, "off") == 0 || is_number(key, text);
    case JIT_WHOLE:
    case JIT_NUMBER:
        return is_number(key, text);
    }
    return false;
}

/* Take one `key=value` of `length` bytes. */
static int take_item(struct jit_options *options, const char *item, size_t length, struct jit_why *why)
{
    const char *equals = memchr(item, '=', length);
    size_t name = equals ? (size_t)(equals - item) : length;
    size_t size = equals ? length - name - 1 : 0;
    int k = 0;

    while (k < JIT_KEY_COUNT && (strlen(KEYS[k].name) != name || strncmp(KEYS[k].name, item, name) != 0))
        k++;
    if (k == JIT_KEY_COUNT) {
        jit_why_set(why, "cannot use key '%.*s': unknown; allowed keys: %s", (int)name, item, NAMES + 2);
        return -1;
    }
    if (size == 0) {
        jit_why_set(why, "cannot use key '%s': it needs a value: %s", KEYS[k].name, KEYS[k].allowed);
        return -1;
    }
    if (size >= PATH_MAX) {
        jit_why_set(why, "cannot use key '%s': longer than %d bytes; allowed: %s", KEYS[k].name, PATH_MAX - 1,
                    KEYS[k].allowed);
        return -1;
    }
    memcpy(options->value[k], equals + 1, size);
    options->value[k][size] = '\0';
    if (!is_allowed(&KEYS[k], options->value[k])) {
        jit_why_set(why, "cannot use key '%s' with value '%s'; allowed: %s", KEYS[k].name, options->value[k],
                    KEYS[k].allowed);
        return -1;
    }
    return 0;
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

/* Put `cwd` before a relative path. */
static int anchor(const struct key *key, char *path, const char *cwd, struct jit_why *why)
{
    char whole[PATH_MAX];
    int length;

    if (path[0] == '\0' || path[0] == '/')
        return 0;
    length = snprintf(whole, sizeof(whole), "%s/%s", strcmp(cwd, "/") == 0 ? "" : cwd, path);
    if (length < 0 || (size_t)length >= sizeof(whole)) {
        jit_why_set(why, "cannot use key '%s': path longer than %d bytes", key->name, PATH_MAX - 1);
        return -1;
    }
    if (!is_path(whole)) { /* the working directory is to blame */
        jit_why_set(why, "cannot use key '%s' with value '%s'; allowed: %s", key->name, whole, key->allowed);
        return -1;
    }
    memcpy(path, whole, (size_t)length + 1);
    return 0;
}

/* Make the paths absolute and put the default, <cwd>/jit-ckpt, where no directory was given. */
int jit_options_anchor(struct jit_options *options, const char *cwd, struct jit_why *why)
{
    if (options->value[DIR][0] == '\0')
        memcpy(options->value[DIR], JIT_OPTION, sizeof(JIT_OPTION));
    if (anchor(&KEYS[DIR], options->value[DIR], cwd, why) != 0)
        return -1;
    return anchor(&KEYS[RESUME], options->value[RESUME], cwd, why);
}

/* Write the canonical text: the given keys in the order of the table. Defaults stay out: Python knows them.
 */
int jit_options_format(const struct jit_options *options, char *text, size_t size)
{
    size_t used = 0;

    for (int k = 0; k < JIT_KEY_COUNT; k++) {
        int length;

        if (options->value[k][0] == '\0')
            continue;
        length =
            snprintf(text + used, size - used, "%s%s=%s", used ? "," : "", KEYS[k].name, options->value[k]);
        if (length < 0 || (size_t)length >= size - used)
            return -1;
        used += (size_t)length;
    }
    return 0;
}

const char *jit_options_dir(const struct jit_options *options)
{
    return options->value[DIR];
}
