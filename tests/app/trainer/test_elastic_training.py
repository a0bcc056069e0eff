"""The language model's training in elastic runs: as threads in virtual time, and as the processes that the command starts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import NAMES, living, played
from run_folders import read_events

from thinwire.app.cli import main
from thinwire.app.cli.train import Options
from thinwire.app.diagnosis import Rules
from thinwire.app.jobs.base import Share
from thinwire.app.records.events import EventLog
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.report import write_report
from thinwire.app.trainer import launch, member, run_folder, supervisor, trainer
from thinwire.app.trainer.job import check, check_and_weigh
from thinwire.app.trainer.meeting import AtLighthouse
from thinwire.app.trainer.member import AdaptiveTimeouts, MemberSpec, RetryReporter, join
from thinwire.app.trainer.place import ElasticPlace, Stop
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.watch import watching
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, LinkError
from thinwire.membership import Lighthouse, LighthouseRendezvous, Timeouts
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous
from thinwire.pieces.partition import Fragment


def test_all_replicas_end_equal_and_their_step_counts_add_up(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    ended = played(cluster, run, tmp_path / "run")
    assert len({summary["weights"] for summary in ended.values()}) == 1
    record = RunRecord.load(tmp_path / "run")
    told = [e for e in read_events(tmp_path / "run/events/replica-0.jsonl") if e["event"] == "round"]
    committed = [e["round"] for e in told if e["committed"] and e["fragment"] >= 0]
    assert record.summary.rounds_committed == len(committed) >= 12  # four fragments in at least three cycles
    assert record.summary.taking_part == 3 and 1 < (record.summary.living or 0) <= 3
    assert (
        record.summary.tokens == 3 * run.optimizer.steps * run.data.batch * run.data.sequence
        and record.status == "finished"
    )
    assert (tmp_path / "run/model.safetensors").exists() and not record.remarks
    read = 3 * run.optimizer.steps * run.data.batch
    told = (record.summary.samples_trained, record.summary.samples_in_flight, record.summary.samples_lost)
    assert told == (read, 0, 0) and ("samples trained", f"{read:,}") in record.summary.figures()
    assert not record.named_samples
    sent = ended["replica-0"]["ledger"]["sent"]["packet"]
    assert sum(count["nbytes"] for count in sent.values()) == record.replicas[0].nbytes_sent  # predicted = counted
    assert [(s.trained, s.jumped, s.counted) for s in record.steps] == [
        (run.optimizer.steps, 0, run.optimizer.steps)
    ] * 3


def test_a_killed_replica_resumes_and_reads_no_sample_twice(
    cluster: SimulatedCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    loss = trainer.Trainer._loss

    def noted(self: trainer.Trainer, micro: int) -> torch.Tensor:
        if hasattr(self, "replica"):
            read.append((self.place.name, micro))
        return loss(self, micro)

    monkeypatch.setattr(trainer.Trainer, "_loss", noted)
    cluster.at("replica-1", "post", lambda: cluster.kill("replica-1"), 40)
    ended = played(cluster, run.changed(steps=48), tmp_path / "run")
    assert len({summary["weights"] for summary in ended.values()}) == 1
    record = RunRecord.load(tmp_path / "run")
    (back,) = [e for e in read_events(tmp_path / "run/events/replica-1.jsonl") if e["event"] == "back"]
    assert back["path"].startswith("checkpoints/replica-1/step-") and back["round"] > 0
    assert [replica.sessions for replica in record.replicas] == [1, 2, 1]
    assert len(read) == len(set(read)), "a replica read a batch twice"
    assert {"away", "back"} <= {note.kind for note in record.notes}
    assert record.status == "finished" and 0 < (record.summary.taking_part or 0) <= 3


def test_samples_of_a_lost_replica_go_to_the_others(cluster: SimulatedCluster, run: Run, tmp_path: Path) -> None:
    """The records of the runs name who read which samples, what landed, what was lost, and who read it again."""
    run, folder = run.changed(steps=96, checkpoint_every=0), tmp_path / "run"
    cluster.at("replica-1", "post", lambda: cluster.kill("replica-1"), 40)

    def mortal(name: str) -> Any:
        return launch.train_here(run, ElasticPlace(MemberSpec(ThreadRendezvous(cluster, name), name), folder, False))

    run_folder.new_folder(run, folder, False)
    ended = cluster.play(dict.fromkeys(NAMES, mortal))
    assert isinstance(ended["replica-1"], Killed) and ended["replica-0"]["weights"] == ended["replica-2"]["weights"]
    logs = {name: read_events(folder / f"events/{name}.jsonl") for name in NAMES}
    read = {n: [set(range(*r)) for e in log if e["event"] == "read" for r in e["ranges"]] for n, log in logs.items()}
    said = {
        kind: [
            (name, x) for e in logs["replica-0"] if e["event"] == "data" for name, a, b in e[kind] for x in range(a, b)
        ]
        for kind in ("trained", "lost", "returned")
    }
    trained, lost = [x for _, x in said["trained"]], {x for _, x in said["lost"]}
    assert len(trained) == len(set(trained)) and not lost & set(trained), "a sample was counted twice"
    assert all(x in set().union(*read[name]) for name, x in said["trained"]), "trained, and not read by that replica"
    assert {name for name, _ in said["lost"] + said["returned"]} == {"replica-1"} and len(said["returned"]) > 100
    again = {x for name, x in said["trained"] if name != "replica-1"} & {x for _, x in said["returned"]}
    assert again, "what was returned is trained by the others"
    survivors = [x for name in ("replica-0", "replica-2") for part in read[name] for x in part]
    assert len(survivors) == len(set(survivors)) and set(survivors) <= set(trained)
    record = RunRecord.load(folder)
    assert (record.summary.samples_trained, record.summary.samples_lost) == (len(trained), len(lost))
    assert "of the order were returned, and others train them, from replica-1" in record.named_samples
    report = write_report([RunRecord.load(folder)], folder / "report.html").read_text()
    assert "samples trained" in report and "from replica-1" in report


def test_each_replica_resumes_from_its_newest_sound_checkpoint(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    played(cluster, run, folder)
    saved = {name: sorted((folder / "checkpoints" / name).glob("step-*")) for name in NAMES}
    (saved["replica-2"][-1] / "outer.safetensors").write_bytes(b"torn")
    ended = played(cluster, run.changed(steps=36), folder, resume=True)
    assert len({summary["weights"] for summary in ended.values()}) == 1
    back = {n: next(e for e in read_events(folder / f"events/{n}.jsonl") if e["event"] == "back") for n in NAMES}
    used = [saved["replica-0"][-1], saved["replica-1"][-1], saved["replica-2"][-2]]
    assert [back[name]["path"] for name in NAMES] == [str(path.relative_to(folder)) for path in used]
    assert "outer.safetensors is not what was written" in back["replica-2"]["skipped"][0]["reason"]
    assert RunRecord.load(folder).summary.steps == Run.load(folder / "run.toml").optimizer.steps == 36


def test_a_resume_with_another_text_names_both_sizes(cluster: SimulatedCluster, run: Run, tmp_path: Path) -> None:
    began = played(cluster, run.changed(steps=12), tmp_path / "run")["replica-0"]["samples"]["in_an_epoch"]
    (text := tmp_path / "other.txt").write_text("another text of other length\n" * 300)
    other = run.changed(text=(str(text),), steps=24)
    one = living(cluster, other, tmp_path / "run", resume=True)
    ended = cluster.play({name: one for name in NAMES})
    errors = [str(error) for error in ended.values() if isinstance(error, CheckpointError)]
    assert errors and all(f"other data: {began:,} samples in an epoch there, " in error for error in errors)


def test_a_resume_with_another_text_is_refused_before_the_folder_changes(
    cluster: SimulatedCluster, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    played(cluster, run.changed(steps=6).absolute(), folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    text, command = tmp_path / "other.txt", ["train", "--resume", "--out", str(folder), "--steps", "24", "--text"]
    text.write_text("another text of other length\n" * 300)
    assert main([*command, str(text)]) == 2
    assert "was begun with other data: 4,811 samples in an epoch there, 516 given" in capsys.readouterr().err
    text.write_text(Path(run.data.text[0]).read_text().replace("thin", "thei"))  # of the same length
    assert main([*command, str(text)]) == 2
    assert "was begun with other data: a text with digest" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    check_and_weigh(Run.load(folder / "run.toml"), folder, goes_on=True)  # its own text


def test_replicas_with_separate_texts_have_no_data_ledger(cluster: SimulatedCluster, run: Run, tmp_path: Path) -> None:
    ended = played(cluster, run.changed(own_text=True, steps=12), tmp_path / "run")
    assert all(summary["samples"] == {} for summary in ended.values())
    assert RunRecord.load(tmp_path / "run").summary.samples_trained is None


def test_token_weights_and_eviction_work_in_an_elastic_run(
    cluster: SimulatedCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[trainer.Trainer] = []
    train = trainer.Trainer.train
    monkeypatch.setattr(trainer.Trainer, "train", lambda self: (seen.append(self), train(self))[1])
    ended = played(cluster, run.changed(weigh="tokens", evict=True, steps=12), tmp_path / "run")
    assert len({summary["weights"] for summary in ended.values()}) == 1
    assert [(one.group.evict, one.replica.tokens) for one in seen] == [(Rules(), 32)] * 3  # type: ignore[union-attr]
    for change in ({"evict": True}, {"grace": "5s"}):
        with pytest.raises(ConfigurationError, match="add --elastic"):
            check(run.changed(carrier="threads", **change))


def met_by(
    cluster: SimulatedCluster, run: Run, folder: Path, stranger: Callable[[str], Any]
) -> tuple[BaseException, dict[str, Any]]:
    """The error of a replica that calls `stranger` when two others of `run` have begun, and what the two end with."""

    def late(name: str) -> Any:
        with cluster.time:
            cluster.wait(name, lambda: False, 8.0)
        return stranger(name)

    two = living(cluster, run, folder)
    ended = cluster.play({"replica-0": two, "replica-1": two, "rome": late})
    assert isinstance(ended["rome"], DisagreementError)
    return ended.pop("rome"), ended


@pytest.mark.parametrize(("other", "says"), [("run", "seed: 5 there, 0 at 'replica-"), ("text", "text: ")])
def test_another_run_or_text_of_the_same_length_is_refused_by_name(
    cluster: SimulatedCluster, run: Run, tmp_path: Path, other: str, says: str
) -> None:
    text = tmp_path / "other.txt"
    text.write_text(Path(run.data.text[0]).read_text().replace("thin", "thei"))
    foreign = run.changed(seed=5) if other == "run" else run.changed(text=(str(text),))
    error, others = met_by(cluster, run, tmp_path / "run", living(cluster, foreign, tmp_path / "other"))
    assert says in str(error) and others["replica-0"]["weights"] == others["replica-1"]["weights"]


def test_a_resume_that_the_others_refuse_leaves_the_run_file(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    """Otherwise a plain --resume would be refused, too."""
    folder = tmp_path / "rome"
    run_folder.new_folder(run, folder, False)
    before = (folder / "run.toml").read_text()

    def stranger(name: str) -> Any:
        with run_folder.claimed(folder, True):
            run_folder.new_folder(run.changed(lr=0.5), folder, True)
            return living(cluster, run_folder.run_in(folder), folder, resume=True)(name)

    error, _ = met_by(cluster, run, tmp_path / "run", stranger)
    assert "lr: 0.5 there" in str(error)
    assert (folder / "run.toml").read_text() == before
    assert {path.name for path in folder.iterdir()} == {"run.toml", "events"}


def test_a_folder_has_one_command_and_one_joining_replica(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the replicas would replace each other's run file, model and summary."""
    run.save(tmp_path / "run.toml")
    given = [str(tmp_path / "run.toml"), "--lighthouse", "127.0.0.1:9", "--timeout", "1"]
    given += ["--out", str(tmp_path / "run"), "--name"]
    with run_folder.claimed(tmp_path / "run", False):
        assert main(["train", *given, "paris"]) == 2
    held = f"another command trains in {tmp_path / 'run'} (process {os.getpid()}); choose another --out"
    assert held in capsys.readouterr().err
    assert not list((tmp_path / "run").iterdir())
    run_folder.new_folder(run.absolute(), tmp_path / "run", False, "oslo")
    EventLog(tmp_path / "run/events/oslo.jsonl").close()
    for again in ([], ["--resume"]):
        assert main(["train", *given, "paris", *again]) == 2
        assert "is the folder of oslo, and paris needs its own; give another --out" in capsys.readouterr().err
    for more in ([], ["--from-start"]):
        assert main(["train", "--resume", "--out", str(tmp_path / "run"), *more]) == 2
        assert "is the folder of oslo, whose run meets elsewhere; resume it there, with" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").rglob("*")} == {"run.toml", "events", "oslo.jsonl"}


def test_each_replica_reads_its_share_of_the_text() -> None:
    assert [Share.of(0, 3, name) for name in NAMES] == [Share(0, index, 3) for index in range(3)]
    for name in ("paris", "oslo", "replica-3", "replica-01", "replica-"):
        own = Share.of(0, 3, name)
        assert (own.index, own.count) == (0, 1) and own == Share.of(0, 3, name)
    assert Share.of(0, 3, "paris").seed != Share.of(0, 3, "oslo").seed


def test_a_lasting_failure_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], list[tuple[int, str]]()
    monkeypatch.setattr(member.time, "monotonic", lambda: now[0])
    hear = RetryReporter(lambda event, step, reason: told.append((step, reason)))
    hear.step = lambda: 7
    for second in range(60):
        now[0] = 100.0 + second
        hear("retry", {"reason": "1 is late", "seconds": 0.1})
    assert told == [(7, "1 is late")] * 2  # after 3 s, and 30 s later
    hear("view", {})
    hear("retry", {"reason": "2 are late", "seconds": 0.1})
    hear("retry", {"reason": "the lighthouse has gone", "seconds": 0.0})
    assert [reason for _, reason in told[2:]] == ["the lighthouse has gone"]


def test_a_replica_says_at_once_that_its_lighthouse_does_not_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        address, told = f"127.0.0.1:{closed.getsockname()[1]}", list[object]()
        monkeypatch.setattr(supervisor._Member, "begin", lambda replica, resume: None)
        monkeypatch.setattr(supervisor, "_watch", lambda *given: None)
        joining = supervisor.JoiningReplica(AtLighthouse(address), "oslo")
        supervisor.train_processes(run, tmp_path, False, lambda: None, say=told.append, joining=joining)
    (line,) = told
    assert str(line).startswith(f"oslo waits: the lighthouse at {address} does not answer (")


def test_timeouts_follow_the_step_time(run: Run) -> None:
    fragments = [Fragment("all", [("all", torch.nn.Parameter(torch.zeros(1000)))])]
    pace = AdaptiveTimeouts(run.changed(every=100).make_strategy(), run.placement, fragments, step_seconds=0.1)
    first = pace.timeouts()
    assert isinstance(first, Timeouts) and first.grace == pytest.approx(2.0)
    for _ in range(64):
        last = pace.after_step(1.0)
    assert last.grace == pytest.approx(10.0) and last.view > first.view + 90
    asked = run.changed(grace="30 steps", every=100)
    given = AdaptiveTimeouts(asked.make_strategy(), asked.placement, fragments, step_seconds=0.1).timeouts()
    assert given.grace == pytest.approx(3.0) and given.view == pytest.approx(first.view + 1.0)


def test_waiting_for_members_ends_at_a_stop_and_at_its_deadline() -> None:
    stop = threading.Event()

    def nobody() -> None:
        raise LinkError("nobody came.")

    with pytest.raises(LinkError, match=r"nobody came\. Gave up after 0\.1 s; --timeout sets this time"):
        join(nobody, lambda: None, stop, 0.1)
    left, waiting = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        left.wait()
        raise LinkError("this replica has left.")

    stopper = threading.Thread(target=lambda: (waiting.wait(), stop.set()))
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        join(wait, left.set, stop, 600.0)
    stopper.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "thinwire-join"]


@pytest.mark.parametrize("there", [True, False], ids=["nobody else", "no lighthouse"])
def test_a_stop_while_waiting_at_a_lighthouse_leaves_no_thread(there: bool, run: Run, tmp_path: Path) -> None:
    """It runs the main function of a replica's process, all of whose threads have ended when it gives up."""
    stop = Stop()
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"")
    if not there:
        lighthouse.close()
    before = set(threading.enumerate())
    run_folder.new_folder(run, tmp_path / "run", False)
    member = MemberSpec(LighthouseRendezvous(lighthouse.address), "replica-0")

    def joining() -> bool:
        if any(thread.name == "thinwire-join" for thread in threading.enumerate()):
            stop.set()
        return stop.is_set()

    with watching(joining, 0.01, "stopper"), pytest.raises(KeyboardInterrupt):
        launch.train_here(run, ElasticPlace(member, tmp_path / "run", stop=stop))
    assert set(threading.enumerate()) <= before
    lighthouse.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategy": "data_parallel"}, "cannot run elastically"),
        ({"least": 3}, "least=3 with replicas=2: no round would be possible"),
        ({"least": 0}, "least=0: at least 1"),
        ({"uplink": "100mbit"}, "carrier='processes'"),
        ({"grace": "soon"}, "grace='soon': a time or a number of steps is needed"),
        ({"grace": "0s"}, "such as 5s, 500ms or '20 steps'"),
    ],
)
def test_settings_that_exclude_elastic_runs_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Run.of(**({"carrier": "elastic"} | change))


def test_command_flags_select_the_carrier() -> None:
    assert Options(Run(), elastic=True).elastically().run_settings == Run.of(carrier="elastic")
    joined = Options(Run(), lighthouse="10.0.0.1", name="oslo").elastically()
    assert (
        joined.run_settings.placement.carrier == "elastic"
        and joined.joining is not None
        and joined.joining.name == "oslo"
    )
    assert Options(Run()).elastically().run_settings == Run() and Options(Run()).joining is None
    for wrong in (Options(Run(), lighthouse="10.0.0.1"), Options(Run(), name="oslo")):
        with pytest.raises(ConfigurationError, match="--lighthouse HOST:PORT --name NAME"):
            wrong.elastically()
    with pytest.raises(ConfigurationError, match="choose one of them"):
        Options(Run.of(carrier="threads"), elastic=True).elastically()


def test_an_elastic_run_resumes_as_an_elastic_run_only() -> None:
    assert Run.of(carrier="elastic").unlike(Run()) == "carrier 'processes' there, 'elastic' given"
    assert not Run.of(carrier="threads").unlike(Run())
    own = Run.of(carrier="elastic", own_text=True)
    assert own.unlike(Run.of(carrier="elastic")) == "own_text False there, True given"
