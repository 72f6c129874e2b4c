/*
 * The hooks that Slurm calls: each only finds its context. The work is in allocator.c (sbatch, salloc),
 * launcher.c (srun) and remote.c (slurmstepd); in any other context nothing happens.
 */
#include "jit_ckpt.h"

/* clang-format off */
#pragma GCC visibility push(default)
SPANK_PLUGIN(jit_ckpt, 1)
#pragma GCC visibility pop
/* clang-format on */

static int jit_plugin_option(int value, const char *argument, int remote)
{
    (void)value;
    (void)remote;
    switch (spank_context()) {
    case S_CTX_ALLOCATOR:
        return jit_allocator_option(argument);
    case S_CTX_LOCAL:
        return jit_launcher_option(argument);
    default:
        return 0;
    }
}

static char option_name[] = JIT_OPTION;
static char option_argument[] = "key=value,...|off";
static char option_usage[] = "save the state of a PyTorch job when it fails, and go on from there";

static struct spank_option option = {
    .name = option_name,
    .arginfo = option_argument,
    .usage = option_usage,
    .has_arg = 2, /* optional */
    .val = 0,
    .cb = jit_plugin_option,
};

/* The static table of options does not work in sbatch, so the option is registered in each context. */
static void register_option(spank_t sp)
{
    if (spank_option_register(sp, &option) != ESPANK_SUCCESS)
        slurm_error("jit-ckpt: init: cannot register --%s: refused by Slurm", JIT_OPTION);
}

int slurm_spank_init(spank_t sp, int ac, char *av[])
{
    switch (spank_context()) {
    case S_CTX_ALLOCATOR:
        register_option(sp);
        return jit_allocator_init(sp, ac, av);
    case S_CTX_LOCAL:
        register_option(sp);
        return jit_launcher_init(ac, av);
    case S_CTX_REMOTE:
        register_option(sp);
        return 0;
    default:
        return 0;
    }
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char *av[])
{
    switch (spank_context()) {
    case S_CTX_ALLOCATOR:
        return jit_allocator_post_opt(sp);
    case S_CTX_LOCAL:
        return jit_launcher_post_opt(sp);
    case S_CTX_REMOTE:
        return jit_remote_post_opt(sp, ac, av);
    default:
        return 0;
    }
}

int slurm_spank_task_exit(spank_t sp, int ac, char *av[])
{
    return spank_context() == S_CTX_REMOTE ? jit_remote_task_exit(sp, ac, av) : 0;
}
