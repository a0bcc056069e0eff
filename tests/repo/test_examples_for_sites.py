"""The files of examples/sites: each is read by its tool's own parser or schema, and Thinwire's parser reads each of its commands."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import ROOT
from pieces import over

from thinwire.app.cli import options
from thinwire.app.cli.token import takes_token
from thinwire.errors import ConfigurationError

SITES = ROOT / "examples/sites"
FILES = sorted(SITES.iterdir())
UNITS = [file for file in FILES if file.suffix == ".service"]
# The instructions in Docker's reference of the Dockerfile.
INSTRUCTIONS = re.findall(
    r"\w+",
    "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL MAINTAINER ONBUILD RUN SHELL STOPSIGNAL USER VOLUME WORKDIR",
)
# The options in Slurm's manual of sbatch that a script for one replica may want.
SBATCH = re.findall(
    r"[a-z-]+",
    """account array batch begin chdir comment constraint container contiguous cores-per-socket cpus-per-gpu cpus-per-task
    deadline dependency distribution error exclude exclusive export extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres hint input job-name kill-on-invalid-dep licenses mail-type mail-user mem
    mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power
    prefer priority profile propagate qos quiet reboot requeue reservation signal sockets-per-node switches test-only
    threads-per-core time time-min tmp uid use-min-nodes verbose wait wait-all-nodes wckey wrap""",
)


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of each command of Thinwire in `text`, also in comments; twice if it can have --resume."""
    joined = re.sub(r"\\\n[#\s]*", "", text)
    found = [words.partition("`")[0] for words in re.findall(r"\bthinwire ((?:hub|join) [^\n;&']*)", joined)]
    found = [re.split(" <{1,3}", words)[0] for words in found]
    found += [shlex.join(words) for words in lists(text)]
    both = [re.sub(r"\$+again\b", again, words) for words in found for again in ("", "--resume")]
    return [shlex.split(words) for words in dict.fromkeys(both)]


def lists(text: str) -> list[list[str]]:
    """Returns the arguments that containers of a Kubernetes file have without a shell."""
    return [re.findall(r'[^\s,"]+', words) for words in re.findall(r"^ +args: \[(.*)\]$", text, re.MULTILINE)]


def documents() -> list[dict]:
    return list(yaml.safe_load_all((SITES / "kubernetes.yaml").read_text()))


def pods() -> dict[str, dict]:
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in documents() if "template" in one["spec"]
    }


def script_of(unit: str) -> str:
    """Returns what the shell gets from ExecStart."""
    line = re.sub(r"\\\n\s*", "", unit).split("ExecStart=")[1].split("\n")[0]
    return shlex.split(line)[2].replace("$$", "$")


@over("file", FILES)
def test_thinwire_takes_each_command(file):
    """A renamed option fails here. Each file starts a hub or a replica, and a replica with --resume, too."""
    text = file.read_text()
    assert commands(text), file
    for verb, *rest in commands(text):
        asked = options.read(importlib.import_module(f"thinwire.app.cli.{verb}").Options, verb, rest, "")
        assert verb == "hub" or (asked.resume == ("--resume" in rest) and takes_token(asked.token)), (
            "others see arguments"
        )
    assert ("$again" in text) == any("--resume" in words for words in commands(text))


def test_wrong_commands_are_found():
    """A continued line, a comment, a list of arguments."""
    for wrong in ("thinwire join T \\\n  --nam a", "#  thinwire hub --uzes 3", "  args: [hub, --elastik]"):
        ((verb, *rest),) = commands(wrong)
        with pytest.raises(ConfigurationError):
            options.read(importlib.import_module(f"thinwire.app.cli.{verb}").Options, verb, rest, "")


def test_systemd_takes_the_units(tmp_path):
    """A line that systemd does not know is a finding. The program is replaced, because systemd looks whether it is there."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not on this machine; it reads the units")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("=/opt/thinwire/bin/thinwire", "=/bin/true"))
    wrong = tmp_path / "wrong.service"
    wrong.write_text(
        UNITS[0]
        .read_text()
        .replace("=/opt/thinwire/bin/thinwire", "=/bin/true")
        .replace("RestartSec", "RestartSeconds")
    )
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())], capture_output=True, text=True
    ).stderr
    ours = [line for line in told.splitlines() if re.search(r"thinwire-\w+\.service", line)]
    assert not ours and "wrong.service" in told and "RestartSeconds" in told, told


def test_the_container_file_is_one():
    """Docker's parser is written in Go, whose runtime must not stay in this process."""
    if not importlib.util.find_spec("dockerfile"):
        pytest.skip("dockerfile has Docker's parser; `make test` installs it")
    program = "import dockerfile, json, sys; print(json.dumps([(c.cmd, c.json, c.value) for c in dockerfile.parse_file(sys.argv[1])]))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.extend({sys.path!r}); {program}"]
    lines = json.loads(subprocess.check_output([*command, str(SITES / "Containerfile")]))
    assert {name for name, *_ in lines} <= set(INSTRUCTIONS)
    copied = {file for name, _, value in lines if name == "COPY" for file in value[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "docs"} <= copied
    assert all((ROOT / file).exists() for file in copied)
    last = {name: (is_list, value) for name, is_list, value in lines}
    assert last["ENTRYPOINT"] == (True, ["thinwire"])
    user = last["USER"][1][0].split(":")[0]
    assert {str(pod["securityContext"]["runAsUser"]) for pod in pods().values()} == {user} - {"0", "root"}


def test_slurm_documents_each_option():
    lines = [line for line in (SITES / "join.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    given = dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups() for line in lines)  # type: ignore[union-attr]
    assert given.keys() <= set(SBATCH) and "requeue" in given
    assert re.fullmatch(r"([RB]+:)?[A-Z0-9]+(@\d+)?", given["signal"])
    assert re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", given["time"]) and re.fullmatch(r"\d+[KMGT]?", given["mem"])


def test_shells_take_the_scripts():
    task = yaml.safe_load((SITES / "skypilot.yaml").read_text())
    (replica,) = pods()["thinwire-oslo"]["containers"]
    scripts = [
        (SITES / "join.sbatch").read_text(), script_of((SITES / "thinwire-join.service").read_text()),
        replica["command"][2], task["setup"], task["run"],
    ]  # fmt: skip
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.fixture
def slurm(tmp_path):
    """Runs join.sbatch with a `thinwire` that sends it a signal, and writes the arguments of `thinwire` and of `scontrol`."""
    thinwire = (
        f'echo "$@" >> {tmp_path}/joined; trap "kill \\$!; exit 143" TERM; sleep 600 & kill -"$SIGNAL" $PPID; wait $!'
    )
    for name, text in (
        ("thinwire", thinwire),
        ("scontrol", f'echo "$@" > {tmp_path}/requeued'),
    ):
        file = tmp_path / "venv/bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o700)
    token = tmp_path / "oslo.token"
    token.write_text("TOKEN\n")
    token.chmod(0o600)

    def run(number: str) -> int:
        given = {"THINWIRE": str(tmp_path), "SIGNAL": number, "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
        return subprocess.run(["bash", str(SITES / "join.sbatch"), "oslo"], env=given, capture_output=True).returncode

    return run


def test_the_slurm_script_saves_queues_itself_and_resumes(slurm, tmp_path):
    """Before the time limit: a signal to the replica, the end of the replica, the job in the queue. A user's SIGTERM: not in the queue."""
    assert slurm("TERM") == 143 and not (tmp_path / "requeued").exists()
    assert slurm("USR1") == 143 and (tmp_path / "requeued").read_text() == "requeue 7\n"
    (tmp_path / "oslo").mkdir()
    (tmp_path / "oslo/run.toml").touch()
    slurm("USR1")
    first, *_, last = (tmp_path / "joined").read_text().splitlines()
    assert first == "join @oslo.token run.toml --name oslo --out oslo --keys keys" and last == f"{first} --resume"
    (tmp_path / "oslo.token").chmod(0o644)
    assert slurm("USR1") == 2 and len((tmp_path / "joined").read_text().splitlines()) == 3


def errors(schema: dict, value: object) -> list[str]:
    checker = pytest.importorskip("jsonschema", reason="jsonschema checks the YAML files; `make test` installs it")
    return [error.message for error in checker.Draft202012Validator(schema).iter_errors(value)]


def schema(name: str) -> dict:
    return json.loads((Path(__file__).parent / "schemas" / name).read_text())


def test_kubernetes_schemas_take_the_file():
    types = schema("kubernetes.json")
    core = {"v1": "core.v1", "apps/v1": "apps.v1", "batch/v1": "batch.v1"}
    for one in documents():
        of = types | {"$ref": f"#/$defs/io.k8s.api.{core[one['apiVersion']]}.{one['kind']}"}
        assert not errors(of, one)
        assert errors(of, one | {"spec": one["spec"] | {"replica": 3}})


def test_names_in_the_kubernetes_file_agree():
    of = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in documents()}
    hub, service, job = of["StatefulSet", "thinwire-hub"], of["Service", "thinwire-hub"], of["Job", "thinwire-oslo"]
    assert service["selector"] == hub["template"]["metadata"]["labels"] == hub["selector"]["matchLabels"]
    (container,) = hub["template"]["spec"]["containers"]
    ports = [port["containerPort"] for port in container["ports"]]
    assert [port["port"] for port in service["ports"]] == ports and f"0.0.0.0:{ports[0]}" in container["args"]
    assert ports[1] == ports[0] + 1
    for pod, extra in ((hub["template"]["spec"], {"data"}), (job["template"]["spec"], set())):
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]} | extra
    claims = [volume.get("persistentVolumeClaim") for volume in job["template"]["spec"]["volumes"]]
    assert ("PersistentVolumeClaim", claims[0]["claimName"]) in of


def test_skypilots_schema_takes_the_task():
    task = yaml.safe_load((SITES / "skypilot.yaml").read_text())
    assert not errors(schema("skypilot.json"), task)
    assert errors(schema("skypilot.json"), task | {"setpu": ""})
    assert errors(schema("skypilot.json"), task | {"resources": {"spot": True}})


def test_the_page_names_each_file():
    page = (ROOT / "docs/sites.md").read_text()
    assert all(f"../examples/sites/{file.name}" in page for file in FILES)
