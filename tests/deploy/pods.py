"""Pods without Kubernetes: rendered pod specs, run in Linux namespaces of their own.

Each pod has a network address, a process tree, a read-only root with only its volumes to write to,
and no capabilities, as the container runtime would give it; all of a release are on one network,
which nothing else is on. What the kubelet and KubeRay's operator do is done here in a few lines:
environment, `ray start`, probes, preStop and SIGTERM.

Needs root, and the programs `ip`, `unshare`, `nsenter` and `setpriv`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests import leaks
from tests.programs import ROOT

Spec = Mapping[str, Any]

_ADDRESSES: Final = "10.77.0"
_GATEWAY: Final = f"{_ADDRESSES}.1"

# Arguments: the pod's folder, this Python, the checkout, then pairs of volume and mount path.
_SANDBOX: Final = r"""
set -eu
folder=$1; python=$2; checkout=$3; shift 3
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/volumes /mnt/checkout
mount --bind "$checkout" /mnt/checkout
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
rm -f /etc/resolv.conf
printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' >/etc/resolv.conf
mount --bind "$folder/../hosts" /etc/hosts
# As the image has it on its PATH.
mkdir /etc/commands
printf '#!/bin/sh\nexec "%s" -m kvservice "$@"\n' "$python" >/etc/commands/kvservice
chmod +x /etc/commands/kvservice
mount -t tmpfs tmpfs /home
mount --bind "$folder" /mnt/volumes
while (($#)); do
  mkdir -p "$2"
  if [ -d "/mnt/volumes/$1" ]; then
    mount --bind "/mnt/volumes/$1" "$2"
  else
    mount -t tmpfs tmpfs "$2"
  fi
  shift 2
done
if ! [ -e "$checkout/pyproject.toml" ]; then  # a volume lies over it
  mkdir -p "$checkout"
  mount --bind /mnt/checkout "$checkout"
fi
umount /mnt/volumes /mnt/checkout
for place in / /etc /home /mnt; do mount -o remount,ro,bind "$place"; done
echo ready
trap : TERM
while :; do sleep 3600 & wait $!; done  # the first process of the pod, which collects the dead
"""


def run(*command: str) -> str:
    """Run a program that is to succeed; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Network:
    """A switch of its own, that pods are plugged into, and the names that they know.

    Fields:
        folder: Made, and removed at the end.
        secrets: What environments refer to, by `name/key`.
        mounted: The folders of ConfigMaps and Secrets that pods mount, by their names.
    """

    folder: Path
    secrets: Mapping[str, str] = field(default_factory=dict)
    mounted: Mapping[str, Path] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._hosts = itertools.count(2)
        self._names: dict[str, str] = {}
        self._pods: list[Pod] = []
        self.folder.mkdir()
        self.name_hosts({})

    def __enter__(self) -> Network:
        self.switch = f"kv{self._id}"
        run("ip", "netns", "add", self.switch)
        self._stack.callback(run, "ip", "netns", "del", self.switch)
        inside = ("ip", "-n", self.switch)
        run(*inside, "link", "add", "switch", "type", "bridge")
        run(*inside, "addr", "add", f"{_GATEWAY}/24", "dev", "switch")
        run(*inside, "link", "set", "switch", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for pod in reversed(self._pods):
            pod.kill()
        self._stack.close()
        shutil.rmtree(self.folder)

    def name_hosts(self, names: Mapping[str, str]) -> None:
        """Let all pods know names by these addresses, besides those that they know."""
        self._names |= names
        lines = [f"{address} {name}\n" for name, address in self._names.items()]
        # In place: the pods have mounted this very file.
        with (self.folder / "hosts").open("w") as hosts:
            hosts.write("127.0.0.1 localhost\n" + "".join(lines))

    def pod(self, name: str, spec: Spec) -> Pod:
        """Start a pod; its containers are started one by one."""
        host = next(self._hosts)
        pod = Pod(self, f"{name}-{host}", f"{_ADDRESSES}.{host}", spec)
        self._pods.append(pod)
        pod.start()
        return pod


class Pod:
    """One pod of a network."""

    def __init__(self, network: Network, name: str, address: str, spec: Spec) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.spec = spec
        self._netns = f"{network.switch}-{name}"
        self._folder = network.folder / name
        self._sandbox: subprocess.Popen[str] | None = None
        self.containers: dict[str, Container] = {}

    def start(self) -> None:
        """Make the namespaces, and the first process in them."""
        self._folder.mkdir()
        for volume in self.spec.get("volumes", []):
            match volume:
                case {"configMap": {"name": source}} | {"secret": {"secretName": source}}:
                    (self._folder / volume["name"]).symlink_to(self.network.mounted[source])
        run("ip", "netns", "add", self._netns)
        port = f"p{self.address.rpartition('.')[2]}"
        switch = self.network.switch
        link = ("ip", "link", "add", "eth0", "netns", self._netns, "type", "veth")
        run(*link, "peer", "name", port, "netns", switch)
        run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        run("ip", "-n", self._netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", self._netns, "link", "set", device, "up")
        run("ip", "-n", self._netns, "route", "add", "default", "via", _GATEWAY)
        self._sandbox = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._netns),
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", _SANDBOX, "sandbox", str(self._folder)),
                *(sys.executable, str(ROOT), *self._mounts()),
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._sandbox.stdout is not None
        assert self._sandbox.stdout.readline() == "ready\n"

    def _mounts(self) -> Iterator[str]:
        """Yield volumes and their paths. All containers see the same, as they do in the chart."""
        mounts = {
            (mount["name"], mount["mountPath"])
            for container in self.spec["containers"]
            for mount in container["volumeMounts"]
        }
        assert len({path for _, path in mounts}) == len(mounts)
        for name, path in sorted(mounts, key=lambda mount: mount[1]):
            yield from (name, path)

    def container(self, name: str) -> Spec:
        """Return the spec of a container."""
        (found,) = [each for each in self.spec["containers"] if each["name"] == name]
        return dict(found)

    def run_container(
        self,
        name: str,
        command: Sequence[str] | None = None,
        extra_env: Mapping[str, str] | None = None,
    ) -> Container:
        """Start a container, with its own command or another."""
        spec = self.container(name)
        env = self.environment(spec) | (extra_env or {})
        started = Container(self, name, env)
        started.start(command if command is not None else spec["command"])
        self.containers[name] = started
        return started

    def environment(self, container: Spec) -> dict[str, str]:
        """Return what the kubelet makes of a container's `env`."""
        found = {
            "PATH": f"/etc/commands:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": ":".join(str(ROOT / part) for part in ("", "client", "workers")),
            leaks.MARK: os.environ[leaks.MARK],
        }
        for entry in container.get("env", []):
            found[entry["name"]] = self._value(entry, container)
        return found

    def _value(self, entry: Spec, container: Spec) -> str:
        match entry:
            case {"value": value}:
                return str(value)
            case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
                return self.address
            case {"valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}:
                return str(container["resources"]["limits"]["cpu"])
            case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                return self.network.secrets[f"{name}/{key}"]
        raise AssertionError(f"{entry} is not known here")

    def exec(
        self, command: Sequence[str], env: Mapping[str, str], timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod, and return how it has ended."""
        return subprocess.run(
            [*self.enter(), *_env(env), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def enter(self) -> tuple[str, ...]:
        """Return a command's beginning that makes it run in this pod."""
        assert self._sandbox is not None
        (init,) = children(self._sandbox.pid)
        return (
            *("nsenter", "--target", str(init), "--mount", "--pid", "--net", "--wd=/"),
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
        )

    def delete(self, timeout_s: float = 60.0) -> list[subprocess.CompletedProcess[str]]:
        """End the pod as the kubelet does: preStop, SIGTERM, and then the rest; return what the
        preStop commands have said."""
        done = []
        for name, container in self.containers.items():
            hook = self.container(name).get("lifecycle", {}).get("preStop")
            if hook is not None:
                done.append(self.exec(hook["exec"]["command"], container.env, timeout_s))
        for container in self.containers.values():
            container.signal(signal.SIGTERM)
        for container in self.containers.values():
            container.wait(timeout_s)
        self.kill()
        return done

    def kill(self) -> None:
        """End everything in the pod at once, as the loss of its node would. May be repeated."""
        if self._sandbox is None:
            return
        self._sandbox.kill()
        self._sandbox.communicate()
        for container in self.containers.values():
            container.wait(10)
        run("ip", "netns", "del", self._netns)
        self._sandbox = None


class Container:
    """A process in a pod; what it prints goes to a file."""

    def __init__(self, pod: Pod, name: str, env: Mapping[str, str]) -> None:
        self.pod = pod
        self.name = name
        self.env = env
        self._log = pod.network.folder / f"{pod.name}-{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        """Start it. The log goes on where it was."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.pod.enter(), *_env(self.env), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        """Return what it has printed so far."""
        return self._log.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        assert self._process is not None
        for child in children(self._process.pid) if self._process.poll() is None else []:
            os.kill(child, number)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return the exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)


def _env(env: Mapping[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in env.items())]


def ray_start(group: Spec, *, head: str | None) -> list[str]:
    """Return the command that KubeRay gives to the Ray container of a group.

    Args:
        group: A `headGroupSpec` or an entry of `workerGroupSpecs`.
        head: The host of Ray's head. None: this is the head.
    """
    flags = {"num-cpus": "", "num-gpus": ""} | dict(group["rayStartParams"])
    custom: dict[str, float] = {}
    for name, amount in group["resources"].items():
        if name in ("CPU", "GPU"):
            flags[f"num-{name.lower()}s"] = amount
        else:
            custom[name] = float(amount)
    if custom:
        flags["resources"] = json.dumps(custom)
    flags |= {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    place = [f"--address={head}:6379"] if head else ["--head", "--include-dashboard=false"]
    return [
        *("ray", "start", "--block", "--disable-usage-stats", *place),
        *(f"--{name}={value}" for name, value in flags.items() if value),
    ]
