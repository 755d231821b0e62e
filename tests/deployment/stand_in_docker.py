"""A stand-in for `docker compose` without images: a service is a process of its users, with folders for its mounts.

It reads compose.yaml of the working folder and the Dockerfile that this names, and keeps all it makes under $STAND_IN.
A file that lies there already under the name of one of the checkout is copied in its place.
Absolute paths of containers are replaced in arguments and variables by where they lie there; so is the coordinator's
address. `tests/deployment/test_containers.py` puts it on PATH under the name of docker.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

PLACE = Path(os.environ["STAND_IN"])
IMAGE = PLACE / "image"


def stages(build: dict) -> dict[str, list[tuple[str, str]]]:
    """{stage: [(instruction, arguments)] of it and of the stage it begins from} of the Dockerfile of a build."""
    file = Path(os.environ["FEDPRIV_CHECKOUT"]) / build["dockerfile"]
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE))
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, text.splitlines()):
        name, arguments = line.split(None, 1)
        if name == "ARG" and not found:
            continue  # the digest of the base, which is this machine
        if name == "FROM":
            source, _, stage = arguments.split()
            found[stage] = [*found.get(source, [])]
        else:
            found[stage].append((name, arguments))
    return found


def substituted(text: str, mounts: dict[str, Path]) -> str:
    """A text with the containers' paths replaced, each where a path can begin."""
    inside = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    return re.sub(rf"(?<![\w.~/-])({inside})(?![\w.-])", lambda found: str(mounts[found[1]]), text)


def pairs(text: str) -> dict[str, str]:
    """The variables of an ENV or ARG instruction."""
    return dict(part.split("=", 1) for part in shlex.split(text))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def build(compose: dict) -> None:
    """Carry out the stage from which every service's image takes its files."""
    IMAGE.mkdir(parents=True)
    context, folder, variables = Path(os.environ["FEDPRIV_CHECKOUT"]), IMAGE, dict(os.environ)
    mounts = {path: IMAGE / path[1:] for path in ("/opt/fedpriv", "/app", "/coordinator", "/holder")}
    for name, text in stages(compose["services"]["coordinator"]["build"])["build"]:
        here = substituted(text, mounts)
        if name in ("ENV", "ARG"):
            variables |= pairs(text)
        elif name == "WORKDIR":
            folder = Path(here)
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = here.split()
            for source in sources:
                content = PLACE / source if (PLACE / source).exists() else context / source
                what = f"{content}/." if content.is_dir() else str(content)
                (folder / target).mkdir(exist_ok=True)
                subprocess.run(["cp", "-r", what, folder / target], check=True)
        elif name == "RUN":
            print("RUN", here, flush=True)
            subprocess.run(["sh", "-e", "-c", here], cwd=folder, env=variables, check=True)


class Container:
    """A service as a process: what the stage of its image and compose.yaml say of it."""

    def __init__(self, name: str, compose: dict) -> None:
        self.name, service = name, compose["services"][name]
        (build,) = [
            each["build"]
            for each in compose["services"].values()
            if each["image"] == service["image"] and "build" in each
        ]
        steps = stages(build)[build["target"]]
        self.mounts = {"/opt/fedpriv": IMAGE / "opt/fedpriv", "/app": IMAGE / "app", "/tmp": PLACE / "tmp" / name}
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            here = Path(source).absolute() if source.startswith(".") else PLACE / "volumes" / source
            if not here.exists():
                shutil.copytree(IMAGE / build["target"] / target[1:], here)
                (copied,) = [
                    text for step, text in steps if step == "COPY" and text.endswith(f" /{build['target']}/ /")
                ]
                user, group = re.search(r"--chown=(\d+):(\d+) ", copied).groups()
                os.chown(here, int(user), int(group))
            self.mounts[target] = here
        self.user, self.group = map(int, service["user"].split(":"))
        self.mounts["/tmp"].mkdir(parents=True, exist_ok=True)
        os.chown(self.mounts["/tmp"], self.user, self.group)
        self.said = dict(steps)
        self.program = service.get("entrypoint") or json.loads(self.said["ENTRYPOINT"])
        self.arguments = service.get("command") or json.loads(self.said["CMD"])
        self.has_check = not service.get("healthcheck", {}).get("disable")
        self.needs = {name: said["condition"] for name, said in service.get("depends_on", {}).items()}
        env = [text for step, text in steps if step == "ENV"]
        self.variables = {key: self.here(value) for text in env for key, value in pairs(text).items()}
        # Of this machine alone: one core, and no network beyond loopback.
        self.variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def here(self, text: str) -> str:
        """A text of the container as it is on this machine."""
        return substituted(text, self.mounts)

    def command(self, command: list[str]) -> list[str]:
        """A command as it is on this machine, at the coordinator's port and one of the node's own."""
        port = PLACE / "port"
        if not port.exists():
            port.write_text(str(free_port()))
        arguments = [self.here(each) for each in command]
        arguments = [each.replace("coordinator:9093", f"127.0.0.1:{port.read_text()}") for each in arguments]
        if "init" in arguments:
            own = port.read_text() if self.name == "coordinator" else str(free_port())
            arguments = ["127.0.0.1" if each == "coordinator" else each for each in arguments] + ["--port", own]
        program = shutil.which(arguments[0], path=self.variables["PATH"])
        assert program, arguments[0]
        return [program, *arguments[1:]]

    def start(self, command: list[str], **options: object) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(command),
            cwd=IMAGE / "app",
            env=self.variables,
            user=self.user,
            group=self.group,
            extra_groups=[],
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )

    def is_healthy(self) -> bool:
        check = json.loads(self.said["HEALTHCHECK"].partition("CMD")[2])
        return self.start(check, stdout=subprocess.DEVNULL).wait() == 0


def up(name: str, compose: dict, *, completes: bool = False) -> int:
    """Start a service after those that it needs, and wait until it is well, or over where others need it to be."""
    container = Container(name, compose)
    for needed, condition in container.needs.items():
        if up(needed, compose, completes=condition == "service_completed_successfully"):
            return 1
    log = (PLACE / f"{name}.log").open("a")
    command = [*container.program, *container.arguments]
    process = container.start(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    if completes:
        return process.wait()
    (PLACE / f"{name}.pid").write_text(str(process.pid))
    deadline = time.monotonic() + 300
    while container.has_check and not container.is_healthy():
        if process.poll() is not None or time.monotonic() > deadline:
            print((PLACE / f"{name}.log").read_text()[-3000:])
            return 1
        time.sleep(2)
    return 0


def down() -> None:
    for file in PLACE.glob("*.pid"):
        pid = int(file.read_text())
        try:
            os.kill(pid, signal.SIGTERM)
            for _ in range(600):
                os.kill(pid, 0)
                time.sleep(0.1)
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        file.unlink()


def main(arguments: list[str]) -> int:
    if arguments[:3] == ["buildx", "imagetools", "inspect"]:
        print("sha256:" + 64 * "0")
        return 0
    assert arguments.pop(0) == "compose"
    compose = yaml.safe_load(Path("compose.yaml").read_text())
    match arguments:
        case ["build"]:
            build(compose)
            return 0
        case ["up", "-d", "--wait", name]:
            return up(name, compose)
        case ["exec", name, *command]:
            return Container(name, compose).start(command).wait()
        case ["run", "--rm", "--entrypoint", program, name, *rest]:
            return Container(name, compose).start([program, *rest]).wait()
        case ["run", "--rm", name, *rest]:
            container = Container(name, compose)
            return container.start([*container.program, *rest]).wait()
        case ["down"]:
            down()
            return 0
    raise SystemExit(f"docker {' '.join(arguments)}: the stand-in does not know it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
