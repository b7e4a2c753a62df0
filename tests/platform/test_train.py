"""Distributed = single process, in float64 to 1e-9: for every kind of LM and every way of cutting the work."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from chaos import hanging_actor, overflowing_loop
from mlflow import MlflowClient
from platform_runs import UnreadBoard, history_rows, make_platform_config, train_in_turn
from torch.testing import assert_close

from malmen.config import Config
from malmen.data.splits import data_fingerprint, validation_records
from malmen.editor import Editor, seeded_editor
from malmen.errors import EditError
from malmen.lm.layers import find_layers
from malmen.lm.model import load_skeleton
from malmen.platform.cluster import Roles
from malmen.platform.events import Began, Board, Event, StepDone
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.lm_worker import LMWorker
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train import Listener, Processes, TrainedEditor, train
from malmen.platform.train_loop import LoopSettings, Rank
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.storage import RunStore
from malmen.training import evaluate_editor
from malmen.training import train as train_alone

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Alone = Callable[[Config], tuple[Editor, dict[str, Any]]]
Runs = tuple[dict[str, Config], dict[str, TrainedEditor]]
KINDS = ("gpt2", "t5", "bert")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The same run in one process: its editor and its scores. Roles and cuts do not matter, so runs are shared."""
    known: dict[str, tuple[Editor, dict[str, Any]]] = {}

    def run(config: Config) -> tuple[Editor, dict[str, Any]]:
        key = config.model_dump_json(include={"model", "editor", "training"})
        if key not in known:
            found = train_alone(config, tmp_path_factory.mktemp("alone") / "run")
            scores = evaluate_editor(
                found.lm, found.editor, validation_records(config), config, generate=False
            ).scores()
            known[key] = (found.editor, scores)
        return known[key]

    return run


def assert_equal_runs(found: TrainedEditor, expected: tuple[Editor, dict[str, Any]]) -> None:
    """θ, normalisers and Adam to 1e-9; the shifts through what is measured of them."""
    editor, scores = expected
    distributed = load_editor(found.checkpoint, optimizer=True)
    assert distributed.steps_done == editor.steps_done
    # Adam divides by the gradient's own size, so where that is near zero a step of meta_lr = 1e-2 carries its rounding:
    # 1e-11 is 1e-9 of such a step.
    assert_close(dict(distributed.state_dict()), dict(editor.state_dict()), rtol=1e-9, atol=1e-11)
    assert_close(distributed.optimizer_state(), editor.optimizer_state(), rtol=1e-8, atol=1e-15)
    for name in ("mean_residual", "max_shift_ratio", "edit_success", "locality_success", "locality_agreement"):
        assert found.scores[name] == pytest.approx(scores[name], rel=1e-9), name


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two LM ranks and one to three actors, with and without ZeRO-3: one after the other on the same ranks."""
    zero3 = {"sharding": "zero3"}

    def config(kind: str, actors: int, **changes: Any) -> Config:
        cluster = {"lm_workers": 2, "hypernet_actors": actors, "overlap": True, **changes.pop("cluster", {})}
        return make_platform_config(kind, models, cluster=cluster, **changes)

    own = {"texts": 30, "max_tokens": 6, "folder": str(tmp_path_factory.mktemp("own_text"))}
    preserving = {"preserved_weight": 2.0, "learn_preserved_weight": True, "token_weights": "learned"}
    phrased = {**preserving, "phrasing_weight": 3.0, "preserved_facts": 11}
    epochs = {"num_edits": 19, "steps": 8, "checkpoint_every": 5}
    configs = {
        **{kind: config(kind, 2, lm=zero3) for kind in KINDS},
        "2+1": config("gpt2", 1, cluster={"overlap": False}),
        "one edit": config("gpt2", 3, lm=zero3, training={"num_edits": 1, "equivalents_per_edit": 1}),
        "four epochs": config("gpt2", 1, lm=zero3, training=epochs),
        "float32": config("gpt2", 1, lm=zero3, model={"dtype": "float32"}),
        "preserved": config("t5", 3, lm=zero3, editor={"preserved_weight": 2.0, "preserved_facts": 9}),
        "own text": config(
            "gpt2",
            2,
            editor=phrased,
            own_text=own,
            data={"unrelated": "self", "near_misses": 2},
            training={"locality_target": 0.01},
        ),
        "own text, sharded": config(
            "t5", 1, lm=zero3, editor=preserving, own_text=own, data={"unrelated": "mixed", "near_misses": 1}
        ),
    }
    return configs, train_in_turn(configs, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", KINDS)
def test_two_sharded_lm_ranks_and_two_actors_equal_one_process(kind: str, two_ranks: Runs, alone: Alone) -> None:
    configs, found = two_ranks
    assert_equal_runs(found[kind], alone(configs[kind]))


@pytest.mark.deepspeed
def test_two_lm_ranks_in_turn_with_one_actor_equal_one_process(two_ranks: Runs, alone: Alone) -> None:
    configs, found = two_ranks
    assert_equal_runs(found["2+1"], alone(configs["2+1"]))


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", ["own text", "own text, sharded"])
def test_two_ranks_that_write_the_models_own_texts_and_answers_equal_one_process(
    name: str, two_ranks: Runs, alone: Alone
) -> None:
    configs, found = two_ranks
    cache = configs[name].own_text.folder
    assert cache is not None
    for file in Path(cache).iterdir():  # one process writes its own
        file.unlink()
    assert_equal_runs(found[name], alone(configs[name]))


def test_one_lm_rank_and_one_actor_equal_one_process(models: Path, tmp_path: Path, alone: Alone) -> None:
    config = make_platform_config("gpt2", models)
    assert_equal_runs(train(config, tmp_path / "run"), alone(config))


def test_one_lm_rank_and_three_actors_equal_one_process(models: Path, tmp_path: Path, alone: Alone) -> None:
    """The rank is this process: alone it has nobody to meet through Ray Train."""
    config = make_platform_config("gpt2", models, cluster={"hypernet_actors": 3, "overlap": True})
    found = train_in_turn({"1+3": config}, tmp_path)
    assert_equal_runs(found["1+3"], alone(config))


@pytest.mark.deepspeed
def test_one_edit_leaves_shares_empty_and_still_equals_one_process(two_ranks: Runs, alone: Alone) -> None:
    """Two ranks, one edit: a rank without edits runs as many forwards as the other. Three actors: one has no rows."""
    configs, found = two_ranks
    assert_equal_runs(found["one edit"], alone(configs["one edit"]))


@pytest.mark.deepspeed
def test_keys_are_preserved_as_in_one_process(two_ranks: Runs, alone: Alone) -> None:
    """Each rank reads its share of nine texts, as many forwards as the other, and all actors know the sums."""
    configs, found = two_ranks
    editor, _ = expected = alone(configs["preserved"])
    assert all(net.moments.diagonal(dim1=1, dim2=2).sum() > 0 for net in editor.nets.values())
    assert_equal_runs(found["preserved"], expected)


@pytest.mark.deepspeed
def test_the_cache_of_later_epochs_changes_nothing(two_ranks: Runs, alone: Alone) -> None:
    """Four epochs of two steps. Ranks find different facts in their caches and still run the same forwards."""
    configs, found = two_ranks
    assert max(row.get("cache_mb", 0) for row in found["four epochs"].history) > 0
    config = configs["four epochs"]
    without = config.model_copy(update={"batch": config.batch.model_copy(update={"cache_mb": 0})})
    assert_equal_runs(found["four epochs"], alone(without))


@pytest.mark.deepspeed
def test_a_model_loaded_in_parts_gives_the_whole_models_scores(two_ranks: Runs, alone: Alone) -> None:
    """In float32, where no rank ever holds all weights (a float64 model is loaded whole and cut then)."""
    configs, found = two_ranks
    editor, scores = alone(configs["float32"])
    state, expected = load_editor(found["float32"].checkpoint).state_dict(), dict(editor.state_dict())
    assert_close(dict(state), expected, rtol=1e-3, atol=1e-4)
    initial = seeded_editor(editor.layers, configs["float32"])  # the control: each part of θ has moved much further
    for name, parameter in editor.named_parameters():
        assert (parameter - initial.get_parameter(name)).abs().max() > 0.01, name
    assert found["float32"].scores["max_shift_ratio"] == pytest.approx(scores["max_shift_ratio"], rel=1e-3)


def test_a_run_on_a_storage_that_only_fsspec_knows_is_logged_and_registered_by_the_same_command(
    models: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all its steps when the registry fails; only what is left is done then."""
    uri, out = f"sqlite:///{tmp_path / 'mlflow.db'}", f"elsewhere://{tmp_path / 'run'}"
    config = make_platform_config("gpt2", models, tracking={"enabled": True, "uri": uri})
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "register", _registry_is_away)
        with pytest.raises(EditError, match="the registry is away"):
            train(config, out)
    messages: list[str] = []
    found = train(config, out, listener=Listener(event=messages.append))
    assert messages[0] == f"resuming {out} after step 3" and "5 of the 5 held-out records" in messages[1]  # one file
    assert found.checkpoint == f"{out}/checkpoint-0000003" and found.registered is not None
    assert_equal_runs(found, alone(config))
    with pytest.raises(EditError, match="already holds a finished run"):
        train(config, out)
    run = MlflowClient(uri).get_run(found.tracking_run)
    layers = [f"transformer.h.{block}.mlp.c_proj" for block in (1, 2)]
    assert run.info.status == "FINISHED" and run.data.tags["data"] == data_fingerprint(config)
    assert {
        "loss/generalization", "loss/locality", "loss/meta", "grad_norm", "bytes_moved", "seconds/step",
        *(f"seconds/{stage}" for stage in ("trace", "send", "solve", "meta_loss", "hypernet", "adam")),
        *(f"{scalar}/{layer}" for scalar in ("damping", "edit_lr") for layer in layers),
        *(f"held_out/{name}" for name in ("edit_success", "generalization_success", "locality_success")),
        "memory_mb/lm0/rss", "memory_mb/hypernet0/rss",
    } <= set(run.data.metrics), sorted(run.data.metrics)  # fmt: skip
    assert run.data.metrics["loss/meta"] == pytest.approx(found.history[2]["meta_loss"])


def _registry_is_away(*_args: object) -> None:
    raise EditError("the registry is away")


def test_an_evaluation_that_fails_costs_no_steps(
    models: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is this process. What is left to do is the evaluation: the editor and its scores are then as ever."""
    config = make_platform_config("gpt2", models, training={"checkpoint_every": 100})
    with monkeypatch.context() as patch:
        patch.setattr("malmen.platform.lm_worker.LMWorker.evaluate", _no_evaluation)
        with pytest.raises(EditError, match="could not be measured"):
            train_in_turn({"run": config}, tmp_path)
    state = read_state(tmp_path / "run")
    assert (state["step"], state["scores"]) == (3, {})
    assert_equal_runs(train_in_turn({"run": config}, tmp_path)["run"], alone(config))


def _no_evaluation(*_args: object) -> None:
    raise EditError("the held-out edits could not be measured")


def test_nothing_is_saved_before_the_driver_has_written_what_led_to_it(models: Path, tmp_path: Path) -> None:
    """Else a killed driver's history would lack steps that a resumed run does not make again."""

    class SlowBoard(Board):
        """Asked whether all is written, it says no and then yes, and notes the last event and what is saved."""

        def written(self) -> bool:
            run = RunStore(tmp_path / "run")
            saved = read_state(run.join(run.checkpoints()[-1])) if run.checkpoints() else {"step": 0, "scores": {}}
            with questions.open("a") as file:
                line = [type(self._events[-1]).__name__, saved["step"], bool(saved["scores"])]
                file.write(json.dumps(line) + "\n")
            return len(questions.read_text().splitlines()) % 2 == 0

    questions = tmp_path / "questions.jsonl"
    config = make_platform_config("gpt2", models, training={"steps": 2, "checkpoint_every": 1})
    train_in_turn({"run": config}, tmp_path, SlowBoard)
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    assert asked[::2] == asked[1::2] == [["Saving", 0, False], ["Saving", 1, False], ["Evaluated", 2, False]]
    assert read_state(tmp_path / "run")["scores"]


def test_a_driver_that_wants_no_more_gets_no_checkpoint_of_what_it_has_not_written(
    models: Path, tmp_path: Path
) -> None:
    class StoppedBoard(Board):
        def stopped(self) -> bool:
            return True

    config = make_platform_config("gpt2", models)
    with pytest.raises(EditError, match="holds no trained editor"):
        train_in_turn({"run": config}, tmp_path, StoppedBoard)
    assert RunStore(tmp_path / "run").checkpoints() == []


def test_a_step_that_its_rank_did_not_report_is_reported_by_the_next(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is lost when the actors have ended step 2 and before it says so. Both ranks are this process."""
    post = Rank._post

    def lost(self: Rank, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            raise KeyboardInterrupt
        post(self, event)

    config = make_platform_config("gpt2", models, training={"checkpoint_every": 100})
    layers = find_layers(load_skeleton(config.model)[0], config.editor.layers, config.editor.ffn)
    group = HypernetGroup.start(config, layers, str(tmp_path / "run"), resources={"num_cpus": 0.1}, threads=1)
    board = ray.remote(UnreadBoard).options(num_cpus=0).remote()
    loop = LoopSettings(config, group, board, str(tmp_path / "run"), 1, False)
    try:
        worker = LMWorker(config, 0, 1, lambda _doing: None)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Rank, "_post", lost)
            Rank(loop, worker).run()
        Rank(loop, worker).run()
        events = ray.get(board.take.remote(), timeout=60)
    finally:
        for actor in (*group.actors, board):
            ray.kill(actor)
    steps = [(type(event), event.step) for event in events if isinstance(event, Began | StepDone)]
    assert steps == [(Began, 0), (StepDone, 1), (Began, 2), (StepDone, 2), (StepDone, 3)]
    uninterrupted = train_in_turn({"whole": config}, tmp_path)["whole"].history
    losses = [
        [row["meta_loss"] for row in rows if "meta_loss" in row] for rows in (history_rows(events), uninterrupted)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    lm_side = [
        [row["bytes_moved"] for row in rows if "meta_loss" in row] for rows in (history_rows(events), uninterrupted)
    ]
    assert lm_side[0] == lm_side[1]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_platform_config("gpt2", models, training={"checkpoint_every": 1})
    monkeypatch.setattr("malmen.platform.train.train_loop", overflowing_loop(step=2))
    with pytest.raises(EditError, match=r"step 2: the meta loss is nan; .*transformer\.h\.2.*; the records were r\d+"):
        train(config, tmp_path / "run")
    assert load_editor(tmp_path / "run").steps_done == 2


def test_a_driver_that_fails_leaves_no_worker_behind(models: Path, tmp_path: Path) -> None:
    def disk_is_full(*_: object) -> None:
        raise OSError("no space left on device")

    config = make_platform_config("gpt2", models, training={"steps": 1000})
    with pytest.raises(OSError, match="no space left"):
        train(config, tmp_path / "run", listener=Listener(step=disk_is_full))
    assert "ray-train" not in {thread.name for thread in threading.enumerate()}  # that is: Ray Train's run has ended


def test_a_hang_is_reported_with_who_waits_for_whom(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor that never comes back from a solve, and a rank that waits for it: the driver says both."""
    monkeypatch.setattr("malmen.platform.hypernet_group.HypernetActor", hanging_actor())
    config = make_platform_config("gpt2", models, cluster={"stall_seconds": 10})  # an actor's first Adam takes seconds
    layers = find_layers(load_skeleton(config.model)[0], "last:1")
    board = ray.remote(Board).options(num_cpus=0).remote()
    group = HypernetGroup.start(config, layers, str(tmp_path), resources={"num_cpus": 0.1}, threads=1)
    impatient = make_platform_config("gpt2", models, cluster={"stall_seconds": 2})
    roles, loop = Roles({}, {}, 1, 1, False), LoopSettings(impatient, group, board, str(tmp_path), 1, False)
    answers: list[str] = []

    def wait_for_shifts() -> None:
        board.note.remote("LM rank 0", "waiting for the shifts of step 0")
        with pytest.raises(EditError) as stop:
            group.finish([group.actors[0].hang.remote()])
        answers.append(str(stop.value))

    rank = threading.Thread(target=wait_for_shifts)
    try:
        group.heal(lambda: None)
        rank.start()
        with pytest.raises(EditError, match=r"nothing happened for .*=2; who does what: LM rank 0: waiting for the sh"):
            list(Processes(roles, loop, rank).events())
        rank.join(60)
    finally:
        for actor in (*group.actors, board):
            ray.kill(actor)
    assert answers[0].startswith("no answer within cluster.stall_seconds=10: hypernet actor 0: hanging for ")
