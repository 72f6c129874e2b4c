/*
 * Ask Slurm's controller whether jobs may ask for an expedited requeue (25.11 and later).
 *
 * Rule: it is asked only where the site's file says `expedite = on`, so other jobs wait for nothing; no
 * answer is a no.
 */
#include <string.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include "jit_ckpt.h"

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 11, 0)
bool jit_slurm_expedites(void)
{
    slurm_conf_t *conf = NULL;
    bool allowed;

    if (slurm_load_ctl_conf(0, &conf) != SLURM_SUCCESS || conf == NULL)
        return false;
    allowed = conf->slurmctld_params != NULL &&
              strcasestr(conf->slurmctld_params, "enable_expedited_requeue") != NULL;
    slurm_free_conf(conf);
    return allowed;
}
#else
bool jit_slurm_expedites(void)
{
    return false;
}
#endif
