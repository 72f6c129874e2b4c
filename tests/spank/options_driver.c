/* Reads option texts that end with a null byte and prints 0 or -1 for each; built with sanitizers by the test. */
#include <stdio.h>
#include <stdlib.h>

#include "jit_ckpt.h"

int main(void)
{
    static struct jit_options options;
    static struct jit_why why;
    char *text = NULL, out[JIT_TEXT_MAX];
    size_t room = 0;

    while (getdelim(&text, &room, '\0', stdin) > 0) {
        int verdict = jit_options_parse(&options, text, &why);

        if (verdict == 0 && jit_options_anchor(&options, "/home/u", &why) == 0)
            (void)jit_options_format(&options, out, sizeof(out));
        printf("%d\n", verdict);
    }
    free(text);
    return 0;
}
