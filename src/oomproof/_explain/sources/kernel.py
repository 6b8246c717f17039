"""A process that something else ended: Linux's OOM killer, cgroups, containers, job schedulers, exit code 137."""

from __future__ import annotations

from oomproof._explain.pattern import Pattern

_KERNEL = ("kernel", "host", "host-ram")

PATTERNS = (
    Pattern(
        "oom-killer",
        "failure",
        "killed process",
        r"(?:Out of memory|Memory cgroup out of memory|oom.?kill\w*).{0,60}Kill(?:ed)? process (?P<pid>\d+)"
        r"(?:.{0,120}?anon-rss:(?P<rss>\d+ ?kB))?",
        "Out of memory: Killed process 21044 (python) total-vm:98123456kB, anon-rss:62914560kB, file-rss:0kB",
        *_KERNEL,
        0.97,
    ),
    Pattern(
        "oom-killer-old",
        "failure",
        "kill process",
        r"(?:Out of memory|Memory cgroup out of memory).{0,30}Kill process (?P<pid>\d+)",
        "Out of memory: Kill process 21044 (python) score 912 or sacrifice child",
        *_KERNEL,
        0.97,
    ),
    Pattern(
        "oom-killer-invoked",
        "failure",
        "oom-kill|oom_reaper|oom killer|memory cgroup out|oomd|earlyoom",
        r"invoked oom-killer|oom-kill:constraint|oom_reaper: reaped process|Memory cgroup out of memory|"
        r"Killed by OOM killer|systemd-oomd.{0,40}kill|oom-kill'|result 'oom-kill|earlyoom.{0,60}(?:sending|kill)",
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        *_KERNEL,
        0.95,
        weight=2.8,
    ),
    Pattern(
        "slurm",
        "failure",
        "oom_kill|oom-kill|oom kill|out_of_me|out-of-memory|out of memory|killed by the cgroup",
        r"(?:slurm\w*|srun|JOB|task).{0,120}(?:oom.kill|OOM Kill|out.of.memory)|\bOUT_OF_ME\+|oom.kill event|State:? OUT_OF_MEMORY|"
        r"Some of (?:your processes|the step tasks) (?:may )?have been (?:killed by the cgroup|OOM)",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5512.batch.",
        *_KERNEL,
        0.95,
    ),
    Pattern(
        "scheduler-limit",
        "failure",
        "memlimit|memory limit|memory request|exceeded limit|out_of_memory|resource: memory",
        r"TERM_MEMLIMIT|Exceeded (?:job|step) memory limit|job killed: v?mem \S+ exceeded limit|exceeded its memory limit|"
        r"exceed\w* (?:the )?memory (?:limit|request)|OUT_OF_MEMORY\s+0:125|memory limit exceeded|"
        r"low on resource: memory",
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        *_KERNEL,
        0.92,
    ),
    Pattern(
        "oom-killed-container",
        "failure",
        "oomkilled",
        r"OOMKilled(?!\W{0,4}false)",
        "      Reason:       OOMKilled",
        *_KERNEL,
        0.97,
    ),
    Pattern(
        "exit-137",
        "failure",
        " 137|:137|=137|(137",
        r"exit(?:ed)?(?: with)?(?: a)?(?: non-zero)?(?: status| code| value|_?code|code)?\W{0,4}(?:status |code )?137\b|"
        r"returned? (?:non-zero )?(?:exit )?(?:code|status)?\W{0,3}137\b|Exit Code:\s*137\b|\bcode 137\b|return ?code\W{0,3}137\b|status[ =:]+137\b",
        "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
        *_KERNEL,
        0.8,
        weight=2.0,
    ),
    Pattern(
        "signal-9",
        "failure",
        "sigkill|status=9/kill|signal 9|signal: 9|signal (9|signal: (9|signal: killed|signal number 9|signal number: 9",
        r"SIGKILL|status=9/KILL|signal(?: number)?:? ?\(?9\b|killed by signal 9|signal: killed|Signals\.SIGKILL",
        "torch.distributed.elastic: Signal 9 (SIGKILL) received by PID 771",
        *_KERNEL,
        0.75,
        weight=2.0,
    ),
    Pattern(
        "exit-minus-9",
        "failure",
        " -9|=-9|:-9|(-9",
        r"exit ?code\s*[:=]?\s*-9\b|returncode[ =:]*-9\b|exited with (?:code )?-9\b|exit status:? -9\b|died with.{0,30}-9\b",
        "failed (exitcode: -9) local_rank: 0 (pid: 771) of binary: python",
        *_KERNEL,
        0.75,
        weight=2.0,
    ),
    Pattern(
        "killed",
        "failure",
        "killed",
        r"^(?:.{0,80}(?:: line \d+: +\d+|\d+) )?\W*Killed(?::? ?9)?(?:\s+\(core dumped\)|\s{2,}\S.*|\s*)$|"
        r"^(?:zsh|bash|sh|fish)\b.{0,60}\bkilled\b|^\[\d+\]\s*[+-]?\s*(?:\d+ )?killed\b",
        "run.sh: line 4: 31337 Killed                  python train.py",
        *_KERNEL,
        0.8,
        weight=2.0,
    ),
    Pattern(
        "killed-in-another-language",
        "failure",
        "getötet|processus arrêté|ucciso|已杀死|強制終了",
        r"^(?:.{0,80}(?:: \w+ \d+: +\d+|\d+) )?\W*(?:Getötet|Processus arrêté|Ucciso|已杀死|強制終了)(?:\s{2,}\S.*|\s*)$",
        "run.sh: Zeile 4: 31337 Getötet                 python train.py",
        *_KERNEL,
        0.8,
        weight=2.0,
    ),
)
