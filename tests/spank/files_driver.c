/* Reads each file that is named as a site's file, as a batch script and as a command line, and prints the verdict
 * on the first; built with sanitizers by the test. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "jit_ckpt.h"

int main(int argc, char *argv[])
{
    for (int i = 1; i < argc; i++) {
        struct jit_site *site = calloc(1, sizeof(*site)); /* on the heap, where a step too far is seen */
        struct jit_wishes *wishes = calloc(1, sizeof(*wishes)), *script = calloc(1, sizeof(*script));
        struct jit_options *options = calloc(1, sizeof(*options));
        struct jit_why why = {""};
        char *words[] = {malloc(strlen(argv[i]) + 6)};

        if (site == NULL || wishes == NULL || script == NULL || options == NULL || words[0] == NULL)
            return 1;
        (void)sprintf(words[0], "conf=%s", argv[i]);
        printf("%d\n", jit_site_load(site, 1, words, &why));
        (void)jit_site_enables(site, "gpu,cpu");
        jit_site_fill(site, options);
        jit_wishes_of_command(wishes, argv[i]);
        (void)snprintf(wishes->script, sizeof(wishes->script), "%s", argv[i]);
        memset(wishes->said, 0, sizeof(wishes->said));
        (void)jit_wishes_of_script(script, wishes);
        (void)jit_seconds(script->value[JIT_SAYS_TIME]);
        free(site);
        free(wishes);
        free(script);
        free(options);
        free(words[0]);
    }
    return 0;
}
