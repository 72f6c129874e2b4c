/*
 * Put environment variables for the Slurm command we run in, and take out again what we put.
 *
 * Rule: what the user set stays as it is. What we put is gone before the command passes its environment on,
 * so that a nested sbatch or srun does not inherit it.
 */
#include <stdlib.h>

#include "jit_ckpt.h"

/* A setting without a value is left to the user. */
void jit_settings_put(struct jit_setting *settings, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (settings[i].value != NULL && getenv(settings[i].name) == NULL &&
            setenv(settings[i].name, settings[i].value, 0) == 0)
            settings[i].ours = true;
}

void jit_settings_take_back(struct jit_setting *settings, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (settings[i].ours)
            (void)unsetenv(settings[i].name);
        settings[i].ours = false;
    }
}
