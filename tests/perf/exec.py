"""What a command costs in one sandbox, through the unmodified SDK.

Times are medians of ROUNDS runs in milliseconds. `exits` and `instructions` are KVM's
counts for one run: how often the guest left, and how many instructions of the guest's
kernel KVM emulated (0 on hardware virtualization). `direct` runs start the program
itself instead of the login shell that the SDK puts before every command.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request

from e2b_code_interpreter import Sandbox as Interpreter

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
MEBIBYTE = b"\xa5" * (1 << 20)


def start_node():
    program = os.path.join(os.environ["WARREN_BIN"], "warren-test-node")
    node = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    told = json.loads(node.stdout.readline())
    os.environ["E2B_API_KEY"] = told["apiKey"]
    os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = told["url"]
    return node, told


def counters(told, sandbox):
    request = urllib.request.Request(
        f"{told['url']}/v1/sandboxes/{sandbox.sandbox_id}", headers={"X-API-KEY": told["apiKey"]}
    )
    vmm = json.load(urllib.request.urlopen(request))["stats"]["vmm"]
    kvm = vmm.get("kvm") or {}
    return kvm.get("exits", 0), kvm.get("emulated_instructions", 0)


def main():
    node, told = start_node()
    try:
        sandbox = Interpreter.create(told["template"], timeout=3600)
        report, work = {}, {}

        def measure(name, call):
            call()  # The first run pages in what the later ones find.
            before = counters(told, sandbox)
            times = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1000)
            after = counters(told, sandbox)
            report[name] = round(statistics.median(times), 3)
            work[name.removesuffix("_ms")] = {
                "exits": round((after[0] - before[0]) / ROUNDS),
                "instructions": round((after[1] - before[1]) / ROUNDS),
            }
            print(f"{name:18} {report[name]:10.1f} ms  {work[name.removesuffix('_ms')]}", flush=True)

        run = lambda command: lambda: sandbox.commands.run(command, timeout=120)
        measure("true_ms", run("true"))
        measure("sh_ms", run("sh -c 'echo hi'"))
        measure("python_ms", run("python3 -c 'print(1)'"))
        measure("direct_true_ms", lambda: direct(told, sandbox, "/bin/true", []))
        measure("direct_sh_ms", lambda: direct(told, sandbox, "/bin/sh", ["-c", "echo hi"]))
        measure("direct_python_ms", lambda: direct(told, sandbox, "/usr/bin/python3", ["-c", "print(1)"]))
        measure("request_ms", lambda: sandbox.is_running())
        measure("run_code_ms", lambda: sandbox.run_code("1+1"))
        measure("write1m_ms", lambda: sandbox.files.write("/tmp/mebibyte", MEBIBYTE))
        measure("read1m_ms", lambda: sandbox.files.read("/tmp/mebibyte", format="bytes"))
        sandbox.kill()

        def host(name, words):
            times = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
                times.append((time.perf_counter() - begin) * 1000)
            report[name] = round(statistics.median(times), 3)

        host("host_true_ms", ["/bin/true"])
        host("host_python_ms", ["/usr/bin/python3", "-c", "print(1)"])
        print(json.dumps(report | {"work": work}))
    finally:
        node.stdin.close()
        node.wait()


def direct(told, sandbox, program, arguments):
    message = json.dumps({"process": {"cmd": program, "args": arguments}}).encode()
    request = urllib.request.Request(
        f"{told['url']}/process.Process/Start",
        data=b"\0" + len(message).to_bytes(4, "big") + message,
        headers={
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": sandbox._envd_access_token or "",
        },
    )
    reply = urllib.request.urlopen(request).read()
    if b'"exitCode":0' not in reply and b'"exited":true' not in reply:
        raise RuntimeError(f"{program} did not end well: {reply[-300:]!r}")


main()
