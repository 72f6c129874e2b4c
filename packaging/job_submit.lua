-- Adds the spare nodes of `--jit-ckpt=spares=K` to a job: with it a user asks for the nodes that the ranks need, and
-- the job gets K more. Slurm reads it as job_submit.lua beside slurm.conf, with JobSubmitPlugins=lua; a site that has
-- such a file already copies `spare_nodes` into its own and calls it. Then /etc/jit-ckpt.conf says adds-spares = on.

local UNSET, UNSET_16 = 4294967294, 65534 -- NO_VAL, NO_VAL16: the user has not said it

-- Nothing here may refuse a job: whatever looks odd leaves it as it is.
local function spare_nodes(job)
    for _, variable in pairs(job.spank_job_env or {}) do
        local options = string.match(variable, "^[%w_]*JIT_CKPT=(.*)$")
        local spares = options and tonumber(string.match("," .. options .. ",", ",spares=(%d+),"))
        if spares and spares > 0 then
            if job.min_nodes == nil or job.min_nodes >= UNSET then
                return "jit-ckpt: spares needs a number of nodes: ask for those that the ranks need with --nodes"
            end
            local nodes = job.min_nodes
            local tasks, per_node = job.num_tasks, job.ntasks_per_node
            if (tasks == nil or tasks >= UNSET) and per_node ~= nil and per_node < UNSET_16 then
                tasks = nodes * per_node
            end
            if job.script ~= nil and tasks ~= nil and tasks < UNSET then
                job.environment["JIT_CKPT_TASKS"] = tostring(tasks) -- 24.11 tells the script the tasks of all nodes
            end
            for _, counted in ipairs({ "num_tasks", "min_cpus" }) do -- of all nodes; the spare ones have theirs too
                local count = job[counted]
                if count ~= nil and count < UNSET and count % nodes == 0 then
                    job[counted] = math.floor(count / nodes) * (nodes + spares)
                end
            end
            if job.max_nodes ~= nil and job.max_nodes < UNSET then
                job.max_nodes = job.max_nodes + spares
            end
            job.min_nodes = nodes + spares
            return nil
        end
    end
    return nil
end

function slurm_job_submit(job, partitions, uid)
    local worked, note = pcall(spare_nodes, job)
    if not worked then
        slurm.log_error("jit-ckpt: cannot add spare nodes: %s", tostring(note))
    elseif note then
        slurm.log_user("%s", note)
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
