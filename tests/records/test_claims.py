"""Who goes on with a run is one machine, and what others write that were cut off is not read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwise.records import claims
from meshwise.records.checkpoints import checkpoints_in, name_of
from meshwise.records.files import append_lines, read_lines
from meshwise.records.folder import begin_session, claim_session, end_session, keep_metrics, read_run, write_run
from meshwise.records.lock import FolderLock, is_abandoned


def test_an_attempt_is_claimed_once(tmp_path: Path) -> None:
    assert claims.newest(tmp_path) == 0 and claims.newest_record(tmp_path) is None
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda machine: claims.claim(tmp_path, 1, {"machine": machine}), range(8)))
    assert won.count(True) == 1 and claims.newest(tmp_path) == 1
    assert claims.claims_of(tmp_path) == {1: {"machine": won.index(True)}}


def test_an_earlier_attempt_is_not_claimed_any_more(tmp_path: Path) -> None:
    assert claims.claim(tmp_path, 3, {}) and not claims.claim(tmp_path, 2, {})
    assert claims.is_over(tmp_path, 2) and not claims.is_over(tmp_path, 3)


def test_what_a_launcher_writes_whose_attempt_is_over_is_not_read(tmp_path: Path) -> None:
    assert claim_session(tmp_path, 1)
    begin_session(tmp_path, 1e9, job="gpt", machine=0)
    stale = read_run(tmp_path)
    assert claim_session(tmp_path, 2)
    end_session(tmp_path, "failed", "machine 0 is lost")
    begin_session(tmp_path, 1e9 + 5, machine=1)
    stale["sessions"][0] |= {"status": "failed", "ended": 1e9 + 60}
    write_run(tmp_path, stale | {"status": "failed", "error": "machine 1 is lost"})
    run = read_run(tmp_path)
    assert (run["status"], run["machine"], len(run["sessions"])) == ("running", 1, 2)
    assert '"machine": 1' in (tmp_path / "run.json").read_text()
    end_session(tmp_path, "finished")
    assert [session["status"] for session in read_run(tmp_path)["sessions"]] == ["failed", "finished"]


def test_who_claims_an_attempt_takes_the_folder_from_one_that_was_cut_off(tmp_path: Path) -> None:
    cut_off, here = FolderLock(tmp_path), FolderLock(tmp_path, claimed=True)
    cut_off.close()
    assert not is_abandoned(tmp_path)
    here.close()
    assert is_abandoned(tmp_path)


def test_a_checkpoint_that_is_whole_only_after_a_later_attempt_began_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for name in (name_of(4, 1), name_of(8, 1)):
        (folder / name).mkdir(parents=True)
    assert claim_session(tmp_path, 1) and claim_session(tmp_path, 2)
    (folder / name_of(12, 1)).mkdir()
    assert [saved.step for saved in checkpoints_in(folder)] == [4, 8]
    (folder / name_of(10, 2)).mkdir()
    assert claim_session(tmp_path, 3)
    (folder / name_of(14, 2)).mkdir()
    assert [(saved.attempt, saved.step) for saved in checkpoints_in(folder)] == [(1, 4), (1, 8), (2, 10)]


def test_lines_go_to_the_file_that_was_opened_and_to_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1}])
    with path.open("rb") as held:
        assert append_lines(path, [{"step": 2}], held)
        keep_metrics(tmp_path, 1, lambda record: record["step"] <= 1)  # a later attempt, which goes on after step 1
        append_lines(path, [{"step": 2, "of": "the later"}])
        assert not append_lines(path, [{"step": 3}], held)
    assert read_lines(path) == [{"step": 1}, {"step": 2, "of": "the later"}]
