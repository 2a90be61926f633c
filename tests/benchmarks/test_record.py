import json
from pathlib import Path

import pytest

from benchmarks.record import BENCHES, FIELDS, RESULTS, check_record, commit, write_record

CORRECT = {"compared": "reference", "max_error": 1e-6}


def test_a_record_is_completed_from_its_surroundings(tmp_path):
    record = write_record(
        "index_decode",
        "r64_s32k",
        results=tmp_path,
        us=20.0,
        p10=19.0,
        p90=22.0,
        floor_us=16.0,
        peer="vllm",
        peer_us=30.0,
        correct=CORRECT,
    )
    [line] = (tmp_path / "index_decode.jsonl").read_text().splitlines()
    assert json.loads(line) == record
    assert (record["x_floor"], record["ratio"]) == (1.25, 1.5)
    assert record["gpu"]
    assert record["versions"]["torch"].startswith("2.")
    assert record["commit"] == commit()
    assert list(record) == [key for key in FIELDS if key in record]


def test_records_of_a_bench_are_appended(tmp_path):
    for seed in range(3):
        value = {"before": 0.2, "after": 0.7}
        write_record("demo", f"seed{seed}", results=tmp_path, value=value, correct=CORRECT)
    lines = (tmp_path / "demo.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["seed0", "seed1", "seed2"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"value": 1.0, "colour": "red"}, r"unknown keys \['colour'\]"),
        ({"value": "fast"}, "value='fast' is str, not int or float or dict"),
        ({"value": True}, "value=True is bool"),
        ({"value": float("nan")}, "value=nan is not finite"),
        ({"value": {"after": "x"}}, "value.after='x' is no number"),
        ({}, "measures nothing"),
        ({"us": 1.0}, r"\['us'\] without \['p10', 'p90'\]"),
        ({"value": 1.0, "floor_us": 2.0}, r"\['floor_us'\] without \['x_floor'\]"),
        ({"value": 1.0, "peer": "vllm"}, r"\['peer'\] without \['peer_us', 'ratio'\]"),
        ({"value": 1.0, "peak_bytes": 1.5}, "peak_bytes=1.5 is float, not int"),
        ({"value": 1.0, "correct": {}}, "say what was compared"),
    ],
)
def test_a_record_outside_the_schema_is_refused_and_not_written(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        write_record("demo", "x", results=tmp_path, **({"correct": CORRECT} | fields))
    assert not (tmp_path / "demo.jsonl").exists()


def test_results_that_are_named_as_a_file_are_one(tmp_path):
    file = tmp_path / "new" / "x.jsonl"
    for bench in ("demo", "engine"):
        write_record(bench, "x", results=file, value=1.0, correct=CORRECT)
    benches = [json.loads(line)["bench"] for line in file.read_text().splitlines()]
    assert benches == ["demo", "engine"]
    assert list(file.parent.iterdir()) == [file]


def test_a_bench_without_a_name_in_the_design_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bench='demos'; use one of index_decode"):
        write_record("demos", "x", results=tmp_path, value=1.0, correct=CORRECT)


def test_every_committed_record_holds_against_the_schema():
    files = sorted(RESULTS.glob("*.jsonl"))
    assert {file.stem for file in files} <= set(BENCHES)
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            check_record(record)
            assert record["bench"] == file.stem
    assert Path(RESULTS).name == "results"
