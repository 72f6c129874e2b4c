/*
 * Turn the text of one value into "allowed" or a reason: the checks that the option and the site's file
 * share.
 *
 * Rule: no I/O, no Slurm, no locale (strtod reads the locale's decimal point, so it is not used).
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "jit_ckpt.h"

enum { DIGITS = 9, LONGEST_NAME = 64 };
static const uint64_t SCALE = 1000000000; /* ten to the DIGITS: numbers are compared in billionths */
static const char NAME_CHARACTERS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";

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
static bool is_number(const struct jit_key *key, const char *text)
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

/* The number of an allowed value, without what is behind the point. */
uint32_t jit_whole_part(const char *value)
{
    uint64_t number;

    (void)read_digits(value, &number);
    return (uint32_t)number;
}

bool jit_is_path(const char *text)
{
    for (; *text != '\0'; text++)
        if (is_control(*text) || *text == ',')
            return false;
    return true;
}

static bool is_word(const char *text, size_t length, const char *word)
{
    return strlen(word) == length && strncmp(text, word, length) == 0;
}

static bool is_name(const char *text, size_t length)
{
    return length > 0 && length <= LONGEST_NAME && strspn(text, NAME_CHARACTERS) >= length;
}

/* Take the next item of a list, without the blanks around it; false at the end of the list. */
bool jit_list_next(const char **list, const char **item, size_t *length)
{
    if (*list == NULL)
        return false;
    *length = strcspn(*list, ",");
    *item = *list;
    *list = (*item)[*length] == ',' ? *item + *length + 1 : NULL;
    for (; *length > 0 && (**item == ' ' || **item == '\t'); (*length)--)
        (*item)++;
    while (*length > 0 && ((*item)[*length - 1] == ' ' || (*item)[*length - 1] == '\t'))
        (*length)--;
    return true;
}

/* `on` and `off` stand alone: among others they would be taken for names. */
static bool is_names(const char *text)
{
    const char *rest = text, *item;
    size_t length;
    bool alone = strchr(text, ',') == NULL;

    while (jit_list_next(&rest, &item, &length))
        if (!is_name(item, length) ||
            (!alone && (is_word(item, length, "on") || is_word(item, length, "off"))))
            return false;
    return true;
}

static bool is_paths(const char *text)
{
    const char *rest = text, *item;
    size_t length;

    while (jit_list_next(&rest, &item, &length)) {
        if (length == 0 || *item != '/')
            return false;
        for (size_t i = 0; i < length; i++)
            if (is_control(item[i]))
                return false;
    }
    return true;
}

static bool is_allowed(const struct jit_key *key, const char *text)
{
    switch (key->kind) {
    case JIT_PATH:
        return jit_is_path(text);
    case JIT_ABSOLUTE:
        return text[0] == '/' && jit_is_path(text);
    case JIT_PATHS:
        return is_paths(text);
    case JIT_SWITCH:
        return strcmp(text, "on") == 0 || strcmp(text, "off") == 0;
    case JIT_NAME:
        return is_name(text, strlen(text));
    case JIT_NAMES:
        return is_names(text);
    case JIT_NUMBER_OR_OFF:
        return strcmp(text, "off") == 0 || is_number(key, text);
    case JIT_WHOLE:
    case JIT_NUMBER:
        return is_number(key, text);
    }
    return false;
}

/* The place of the key whose name is the `length` bytes at `name`; -1 if there is none. */
int jit_key_find(const struct jit_key *keys, int count, const char *name, size_t length)
{
    for (int k = 0; k < count; k++)
        if (is_word(name, length, keys[k].name))
            return k;
    return -1;
}

/* Copy a value of `length` bytes into `to`, which has room for PATH_MAX, if the key allows it. */
int jit_key_take(const struct jit_key *key, const char *value, size_t length, char *to, struct jit_why *why)
{
    if (length == 0) {
        jit_why_set(why, "cannot use key '%s': it needs a value: %s", key->name, key->allowed);
        return -1;
    }
    if (length >= PATH_MAX) {
        jit_why_set(why, "cannot use key '%s': longer than %d bytes; allowed: %s", key->name, PATH_MAX - 1,
                    key->allowed);
        return -1;
    }
    memcpy(to, value, length);
    to[length] = '\0';
    if (is_allowed(key, to))
        return 0;
    jit_why_set(why, "cannot use key '%s' with value '%s'; allowed: %s", key->name, to, key->allowed);
    return -1;
}
