"""Times Deep Gradient Compression and local steps on hosts with a slow link, compared with dense all-reduce.

The hosts are network namespaces of this machine. Each has one interface, connected to a switch by a link of limited
rate in both directions. One worker runs on each host, with MindSpore's own collectives; the scheduler runs on the first
host. Workers train the same network on different data: first a few steps that are checked, then the timed steps, over
which each worker reads its interface's counters. These include everything that the host sent and received, also
headers, acknowledgements and heartbeats. It requires root, and the commands ip and tc of iproute2.

    python benchmarks/dgc_cluster.py                            2 and 4 workers, 100 Mbit/s and 1 Gbit/s
    python benchmarks/dgc_cluster.py --workers 2 --links 100    one cluster
    python benchmarks/dgc_cluster.py --workers 2 --links 100 --loss 1.0    the time to train to a loss
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

# Features of the network's input, its hidden layer and its output: 5.3M parameters, nearly all in one matrix.
LAYERS = (5120, 1024, 64)
PREFIX, PORT = "dgc", 8118
# A message of DGC must not fit in it: the link would let it pass at once.
BURST = "16kb"
TIMEOUT = 1200
WORKER = Path(__file__).resolve().with_name("dgc_worker.py")


# ---- Hosts --------------------------------------------------------------------------------------------------------


def sh(*command):
    """Run a command and return its output; raise a RuntimeError with its error message if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"'{' '.join(map(str, command))}' failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def address(host):
    """Return the IP address of a host; hosts are counted from 0."""
    return f"10.0.0.{host + 1}"


def limit(namespace, interface, rate):
    """Limit the send rate of an interface, in Mbit/s."""
    sh("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", f"{rate}mbit", "burst",
       BURST, "latency", "50ms")  # fmt: skip


@contextmanager
def hosts(count, rate):
    """Build hosts with links of a rate in Mbit/s, yield the names of their namespaces, and remove everything.

    The switch has its own namespace, so that nothing outside these namespaces changes.
    """
    names = [f"{PREFIX}-{os.getpid()}-{host}" for host in range(count)]
    switch = f"{PREFIX}-{os.getpid()}-switch"
    try:
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            sh("ip", "netns", "add", name)
            sh("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            sh("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            limit(name, "eth0", rate)
            limit(switch, port, rate)
        yield names
    finally:
        remove([*names, switch])


def existing():
    """Return the names of all namespaces."""
    return [line.split()[0] for line in sh("ip", "netns", "list").splitlines()]


def remove(names):
    """Remove the existing ones of these namespaces with their processes and interfaces."""
    for name in set(names) & set(existing()):
        for pid in sh("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        sh("ip", "netns", "delete", name)


def left_over(names, alive):
    """Return the names of namespaces left over from runs that have ended."""
    found = ((name, re.fullmatch(rf"{PREFIX}-(\d+)-(\d+|switch)", name)) for name in names)
    return [name for name, match in found if match and not alive(int(match[1]))]


def why_not():
    """Return why hosts cannot be created here, or None if they can."""
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {' and '.join(missing)} of iproute2 is missing"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1, 100):
            return None
    except RuntimeError as error:
        return str(error)


# ---- A cluster ----------------------------------------------------------------------------------------------------


def environment(role, node, workers):
    """Return a process's environment."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "3",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "MS_ROLE": role,
        "MS_NODE_ID": str(node),
        "MS_WORKER_NUM": str(workers),
        "MS_SCHED_HOST": address(0),
        "MS_SCHED_PORT": str(PORT),
        "MS_WORKER_IP": address(node),
    }


def run(names, options):
    """Train on hosts; return each worker's results, by rule."""
    processes, outputs = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for role, node in (("MS_SCHED", 0), *(("MS_WORKER", node) for node in range(len(names)))):
                output = open(Path(folder) / f"{role}{node}", "w+")  # noqa: SIM115 - closed below
                outputs.append(output)
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", names[node], sys.executable, WORKER, json.dumps(options)],
                        env=environment(role, node, len(names)), cwd=folder, start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
            deadline = time.monotonic() + TIMEOUT
            while any(process.poll() is None for process in processes[1:]):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            failed = [(p, o) for p, o in zip(processes, outputs) if p.poll()]
            if failed or any(process.poll() is None for process in processes[1:]):
                raise RuntimeError("\n".join([last_words(o) for _, o in failed]) or f"no end within {TIMEOUT} s")
            return [results(output) for output in outputs[1:]]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for output in outputs:
                output.close()


def last_words(output, count=12):
    """Return the last lines of a process's output."""
    output.seek(0)
    lines = [line.rstrip() for line in output if line.strip() and not line.startswith(("RESULT ", "[INFO]"))]
    return "\n".join(lines[-count:])


def results(output):
    """Return a worker's results, by rule."""
    output.seek(0)
    found = [json.loads(line[7:]) for line in output if line.startswith("RESULT ")]
    return {result["rule"]: result for result in found}


def together(workers):
    """Combine the results of all workers: the bytes of the busiest, the times of the slowest."""
    return {
        rule: {key: max(worker[rule][key] for worker in workers) for key in result if key != "rule"}
        for rule, result in workers[0].items()
    }


# ---- The tables ---------------------------------------------------------------------------------------------------


def link_name(rate):
    """Return a link's rate as text."""
    return f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"


def tables(measured):
    """Return the table of rules, and the table of the parts of a DGC step."""
    from rich.table import Table

    inputs, hidden, outputs = LAYERS
    size = (inputs + 1) * hidden + (hidden + 1) * outputs
    rules = Table(
        title=f"{size / 1e6:.2f}M float32 parameters; a step of the busiest worker; ÷: the better dense by it"
    )
    parts = Table(title="Where the time of a step of DGC goes, ms, by the quickest of its steps")
    for table, headings in (
        (rules, ("workers", "link", "rule", "sent", "received", "s", "least s", "÷ bytes", "÷ s")),
        (parts, ("workers", "link", "step", "gradients", "optimizer", "exchange", "AllGather alone")),
    ):
        table.title_justify = "left"
        for heading in headings:
            table.add_column(heading, justify="left" if heading in ("link", "rule") else "right", no_wrap=True)
    for (workers, rate), found in measured.items():
        cluster = (str(workers), link_name(rate))
        dense = [result for rule, result in found.items() if rule.startswith("dense")]
        # Against the better of the two.
        least, fastest = (min(result[key] for result in dense) for key in ("sent", "seconds"))
        for rule in (rule for rule in found if rule.startswith(("DGC", "DiLoCo", "SparseLoCo", "dense"))):
            result = found[rule]
            rules.add_row(
                *cluster,
                rule,
                f"{result['sent']:,.0f}",
                f"{result['received']:,.0f}",
                f"{result['seconds']:.4f}",
                f"{result['least']:.4f}",
                f"{least / result['sent']:.1f}",
                f"{fastest / result['seconds']:.1f}",
            )
        step, alone, gradients, gather = (
            found[rule]["least"] for rule in ("DGC", "no exchange", "gradients", "AllGather")
        )
        moments = (step, gradients, alone - gradients, step - alone, gather)
        parts.add_row(*cluster, *(f"{1e3 * seconds:.1f}" for seconds in moments))
    return rules, parts


def table_to_loss(measured):
    """Return the table of what it took to train to a loss."""
    from rich.table import Table

    table = Table("workers", "link", "rule", "s", "÷ dense", "steps", "sent", "loss")
    for (workers, rate), found in measured.items():
        for rule, result in found.items():
            table.add_row(
                str(workers), link_name(rate), rule, f"{result['seconds']:.1f}",
                f"1/{found['dense']['seconds'] / result['seconds']:.1f}", str(result["steps"]),
                f"{result['sent']:,.0f}", f"{result['least']:.3f}",
            )  # fmt: skip
    return table


def stop(number, _frame):
    """Exit as after a failure, so that everything is removed."""
    raise SystemExit(128 + number)


def main():
    """Measure on one cluster after the other and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", type=int, nargs="+", default=[100, 1000], help="rates in Mbit/s")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of DGC")
    parser.add_argument("--dense-steps", type=int, default=5, help="timed steps of dense all-reduce")
    parser.add_argument("--batch", type=int, default=16, help="samples per worker")
    parser.add_argument("--wire-dtype", default="float32", help="dtype in which DGC sends values")
    parser.add_argument("--loss", type=float, help="train until this loss is reached instead, and time that")
    parser.add_argument("--most", type=int, default=3000, help="steps after which training to a loss ends")
    arguments = parser.parse_args()
    if min(arguments.workers) < 2:
        parser.error("--workers must be at least 2")

    from rich.console import Console

    console = Console(width=max(120, Console().width))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    reason = why_not()
    if reason:
        raise SystemExit(f"cannot make hosts here: {reason}")
    remove(left_over(existing(), lambda pid: Path(f"/proc/{pid}").exists()))
    options = {key: getattr(arguments, key) for key in ("steps", "dense_steps", "batch", "wire_dtype", "loss", "most")}
    measured = {}
    for workers in arguments.workers:
        for rate in arguments.links:
            start = time.perf_counter()
            try:
                with hosts(workers, rate) as names:
                    measured[workers, rate] = together(run(names, options))
            except RuntimeError as error:
                raise SystemExit(f"{workers} workers, {link_name(rate)}: {error}") from None
            taken = time.perf_counter() - start
            console.print(f"{workers} workers, {link_name(rate)}: done in {taken:.0f} s", highlight=False)
    for table in (table_to_loss(measured),) if arguments.loss else tables(measured):
        console.print(table)


if __name__ == "__main__":
    main()
