"""The page of a results file: what it says, its figures, and that both come out the same again."""

import copy
import html
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from made_runs import run, suite
from markdown_it import MarkdownIt  # rich's

from oqc.experiments import comparison, findings
from oqc.experiments.claims import AFBO, FULL, LOWRANK, OURS, STATEMENTS
from oqc.experiments.results import MARK, results_page
from oqc.report.markdown import beside, bound, markdown_table, p_value, signed, spread
from oqc.report.provenance import environment_line, training_line
from oqc.report.statistics import assess_all

MLP_ROWS = ("MLP, no PR", "MLP+PR", "OQC-LR, R 56")
EFFECTS = {FULL: 1.34, "cifar100_unprojected_r56": 0.8}


@pytest.fixture(scope="module")
def records():
    return suite(EFFECTS) + [run("cifar100_afbo_50epochs", seed, 64.9) for seed in range(2)]


@pytest.fixture(scope="module")
def page(records):
    return results_page(records)


def test_sections_and_figures(page):
    titles = re.findall(r"^##+ (.*)$", page.text, flags=re.M)
    for title in ("What holds", "What does not hold", "Main table", "Capacity", "Decomposition", "Rank sweep",
                  "Mechanism", "Claims", "Calibration"):  # fmt: skip
        assert title in titles
    assert list(page.figures) == [f"figures/{name}.svg" for name in ("claims", "rank-sweep", "pareto", "mechanism")]
    for path, svg in page.figures.items():
        assert f"]({path})" in page.text
        assert ET.fromstring(svg).tag.endswith("svg")
    assert "not run yet" not in page.text
    assert "None" not in page.text
    assert not re.search(r"\bnan\b", page.text)


def test_same_records_give_the_same_bytes(page, records):
    again = results_page(records)
    assert again == page


def test_rows_stand_beside_the_papers(page):
    (line,) = re.findall(r"^\| OQC full, R 64 \| 7\.19 M \(6\.97 M\) .*$", page.text, flags=re.M)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == "65.59 ± 0.22"
    assert cells[5:7] == ["4", "+1.34"]
    assert re.fullmatch(r"\+1\.\d\d \[\+1\.\d\d, \+1\.\d\d\]", cells[7])
    assert cells[8:] == ["48,000 (5,642)", "0.80 (0.58)"]


def test_gains_are_over_the_sections_own_base():
    text = results_page(suite({"cifar100_mlp_nopr": -8})).text
    section = text.partition("### Decomposition\n")[2].partition("###")[0]
    gains = {row[0]: row[6:8] for line in section.splitlines() if (row := line.strip("| ").split(" | "))[0] in MLP_ROWS}
    assert gains["MLP, no PR"] == ["–", "–"]
    assert gains["MLP+PR"][0] == "+0.02"
    assert 7 < float(gains["MLP+PR"][1].split()[0]) < 9
    assert gains["OQC-LR, R 56"][0] == "+2.34"
    assert -1 < float(gains["OQC-LR, R 56"][1].split()[0]) < 1
    pilot = text.partition("### ViT-Tiny readout pilot\n")[2]
    assert re.search(r"^\| ViT-Tiny, MLP\+PR \|.* \| \+0\.43 \| [+-]0\.\d\d \[-", pilot, flags=re.M)


def test_mechanism_in_sentences(page):
    assert "the overlap of branch and host is 1.31 times chance before it and at most 2.0e-08 after it" in page.text
    assert "`separation_cosine` 1.1000, `separation_cosine_centred` 1.2000, `separation_scatter` 0.4000" in page.text
    assert "Set beside it is the nearest, `separation_centroids`." in page.text
    records = suite({}, presets=(AFBO, FULL))
    for record in records:
        record["mechanism"]["separation_centroids"] = 1.4
    assert (
        "Set beside it is `separation_centroids`, though `separation_cosine` is nearer." in results_page(records).text
    )


def test_records_from_before_the_separation_by_centroids_have_it_from_the_scatter(records):
    before = copy.deepcopy(records)
    for record in before:
        del record["mechanism"]["separation_centroids"]
    row = comparison.compare(before).rows[AFBO]
    assert row["separation_centroids"] == pytest.approx((2 * 100 / 99 * 0.4) ** 0.5)


def test_what_stays_after_the_correction_is_counted(page, records):
    found = [one for one in comparison.compare(records).findings.values() if one.low > 0 or one.high < 0]
    kept = sum(one.p_holm < 0.05 for one in found)
    assert 0 < kept < len(found)
    told = f"{len(found)} intervals exclude 0, {kept} of them with p below 0.05 after Holm's correction too."
    assert told in page.text


def test_the_first_table_counts_the_verdicts_of_each_statement(page, records):
    held = page.text.partition("## What holds")[2].partition("A claim is *reproduced*")[0]
    rows = [line.strip("| ").split(" | ") for line in held.splitlines() if line.startswith("| ")]
    columns, body = rows[0], {row[0]: row[1:] for row in rows[2:]}
    assert list(body) == list(STATEMENTS)
    found = comparison.compare(records).findings
    for statement, claims in STATEMENTS.items():
        shown = {name: int(cell.replace("–", "0")) for name, cell in zip(columns[1:], body[statement], strict=True)}
        verdicts = Counter(found[claim].verdict for claim in claims)
        assert shown.pop("Claims") == len(claims) == sum(shown.values())
        for name, count in shown.items():
            assert count == verdicts[name.lower().partition(" or ")[0]]
    part = results_page(suite({}, presets=(AFBO, FULL))).text
    assert re.search(r"^\| Ours: does it beat AFBO\+PR widened to the same size\? \| 4 \|.* 4 \|$", part, flags=re.M)
    assert "What the paper says" not in results_page(suite({}, presets=(AFBO,), seeds=1)).text


def test_what_is_contradicted_is_named_with_what_the_correction_leaves():
    of = comparison.compare(suite({"cifar100_static_r83": -5.0}, presets=(AFBO, FULL, "cifar100_static_r83")))
    assert findings.contradicted(of) == (
        '**Contradicted on accuracy**: "OQC-static beats AFBO+PR"; after Holm\'s correction too: 1 of 1.'
    )
    assert findings.contradicted(comparison.compare(suite({FULL: 3.0}, presets=(AFBO, FULL)))) == ""


def test_negative_findings_come_with_the_reason(page):
    reasons = page.text.partition("## What does not hold")[2].partition("\n## ")[0].split("\n\n")
    place = next(k for k, part in enumerate(reasons) if "**Without the projection: below AFBO+PR**" in part)
    assert reasons[place - 1].startswith("Likely a comparison across schedules")
    assert "4 seeds, p (Holm) < 0.001" in reasons[place]


def test_sizes_that_fall_short_are_listed_with_the_reason():
    effects = {FULL: 0.6, "cifar100_lowrank_r56": 1.27, "cifar100_static_r83": -1.0, "cifar100_dynamic_r83": 2.0}
    text = results_page(suite(effects, presets=(AFBO, *effects))).text
    section = text.partition("## Effects of another size than published\n")[2].partition("\n## ")[0]
    short, _, long = section.partition("Larger:\n")
    assert "Likely the training: the paper gives neither epochs nor augmentation" in short
    assert "**OQC full beats AFBO+PR** (table 1: +1.34): ours +0." in short
    assert not any(f"**OQC-{name} beats AFBO+PR**" in short for name in ("LR", "static", "dynamic"))
    assert "**OQC-dynamic beats AFBO+PR** (table 1: +1.08): ours +2." in long
    assert "**OQC full beats AFBO+PR**" not in long
    assert "## Effects of another size" not in results_page(suite({}, presets=(AFBO,))).text


def test_what_is_said_of_gates_names_what_it_rests_on():
    static, dynamic = "cifar100_static_r83", "cifar100_dynamic_r83"
    records = suite({}, presets=(AFBO, FULL, static, dynamic))
    assert "What is said of gates rests on" not in results_page(records).text
    for k, record in enumerate(records):
        if record["preset"] != AFBO:
            record["mechanism"]["gate_mean"] = {static: 0.46, dynamic: 0.26}.get(record["preset"], 0.155) + k % 3 * 1e-3
    text = results_page(records).text
    assert "Scalar gates that start at 0.12 end nearer to 0.190, at 0.156 (OQC full). A spread over" in text
    assert "the one over tokens would (docs/metrics.md): OQC-dynamic's is 0.050." in text
    assert "| Gate std over tokens |" in text
    for record in records:
        record["mechanism"]["gate_token_std"] = None
    assert "| Gate std over tokens |" not in results_page(records).text
    assert "the records of OQC-dynamic lack it." in results_page(records).text


def test_separation_says_whether_its_verdicts_turn_on_the_candidate():
    names = ("centroids", "euclidean", "cosine", "cosine_centred", "scatter")
    records = suite({}, presets=(AFBO, FULL, "cifar100_dynamic_r83"))
    for k, record in enumerate(records):
        far = 0.5 if record["preset"] == FULL else 0.0
        record["mechanism"] |= {f"separation_{name}": 1.0 + far + 1e-3 * (k * 7 % 5) for name in names}
    assert "contradicted is the same whichever of them is taken." in results_page(records).text
    for record in records:
        record["mechanism"]["separation_scatter"] = 2 - record["mechanism"]["separation_scatter"]
    assert "contradicted changes with `separation_scatter`." in results_page(records).text


def test_claims_on_features_say_what_the_main_tables_models_alone_would_say():
    """Two models of other hosts that are noisy widen the interval of a difference that the main table's tell apart."""
    presets = (AFBO, FULL, "cifar100_mlp", "cifar100_mlp_nopr")
    records = suite({}, presets=presets)
    assert re.search(r"of \d+ claims on features: no verdict would change\.", results_page(records).text)
    for k, record in enumerate(records):
        spread = 0.1 if record["preset"] in (AFBO, FULL) else 20.0
        gain = 1.5 if record["preset"] == FULL else 0.0
        record["mechanism"]["effective_rank"] = 77 + gain + spread * ((k * 7) % 5 - 2)
    found = re.search(r"claims on features: (.*)\.$", results_page(records).text, flags=re.M)[1]
    assert found.startswith('"Effective rank: OQC full over AFBO+PR" would be reproduced (+1.')


def test_no_projection_stands_beside_the_model_whose_gate_starts_alike():
    unprojected, static = "cifar100_unprojected_r56", "cifar100_static_r83"
    text = results_page(suite({unprojected: 0.8}, presets=(AFBO, static, unprojected))).text
    section = text.partition("### Alternative designs\n")[2].partition("\n### ")[0]
    assert re.search(r"without the projection gains \+0\.[6-9]\d \[\+.*\] \(4 seeds; R 56 and R 83\)", section)
    assert "without the projection gains" not in results_page(suite({}, presets=(AFBO, unprojected))).text


def test_every_commits_models_are_named():
    records = suite({}, presets=(AFBO, FULL), seeds=2)
    records[3]["environment"] = records[3]["environment"] | {"commit": "0" * 40}
    text = results_page(records).text
    assert "| ea2d3d7 | 3 | AFBO+PR (2), OQC full, R 64 (1) |\n| 0000000 | 1 | OQC full, R 64 (1) |" in text


def test_a_reason_that_was_tested_stands_with_the_outcome():
    static, closed = "cifar100_static_r83", "cifar100_static_r83_closed"
    text = results_page(suite({static: -1.0}, presets=(AFBO, static))).text
    assert "Likely the gate's start" in text
    assert "Our own test" not in text
    for gain, says in ((1.0, "speaks for it"), (-1.0, "speaks against it"), (0.0, "leaves it open")):
        text = results_page(suite({static: -1.0, closed: -1.0 + gain}, presets=(AFBO, static, closed))).text
        assert re.search(rf'Our own test, "OQC-static does better from 0.12 than from 0.5", {says}: [+-]\d', text)


def test_a_test_speaks_against_a_reason_whose_opposite_it_confirms():
    """Without the projection the branch does as well, likely as it needs none. That it does worse where the gates start
    alike speaks against that; where it does as well there too, it stands in the same list and is not told twice."""
    unprojected, closed = "cifar100_unprojected_r56", "cifar100_unprojected_r56_closed"
    presets = (AFBO, LOWRANK, unprojected, closed)
    test = "Without the projection, from 0.12: below OQC-LR"
    text = results_page(suite({LOWRANK: -1.0, closed: -4.0}, presets=presets)).text
    assert f'Our own test, "{test}", speaks against it: ' in text
    text = results_page(suite({LOWRANK: -1.0, closed: 2.5}, presets=presets)).text
    assert "Our own test" not in text
    assert f"- **{test}** (our question): ours +3." in text.partition("## What does not hold")[2].partition("## ")[0]


def test_claims_on_static_are_told_from_the_other_start_too():
    static, closed = "cifar100_static_r83", "cifar100_static_r83_closed"
    assert "with static's gate from 0.12" not in results_page(suite({static: -2.0}, presets=(AFBO, static))).text
    records = suite({static: -2.0, closed: 2.0}, presets=(AFBO, static, closed))
    text = results_page(records[:-2]).text  # two seeds of four
    assert "The same claims with static's gate from 0.12 (2 seeds), as far as either start decides them:" in text
    row = (
        r"^\| OQC-static beats AFBO\+PR \| -[12]\.\d\d \[.*\] \| contradicted \| \+[12]\.\d\d \[.*\] \| reproduced \|$"
    )
    assert re.search(row, text, flags=re.M)
    assert "| OQC-static does better from 0.12" not in text.partition("The same claims")[2].partition("##")[0]
    assert re.search(r"^\| OQC-static from 0\.12 \(2 seeds\) \| 7\d\.\d\d \| [45]\d\.\d\d \|", text, flags=re.M)


def test_verdicts_on_a_score_that_is_a_guess_are_counted():
    records = suite({}, presets=(AFBO, FULL, LOWRANK))
    assert "a score that the paper has no formula of" not in results_page(records).text
    for k, record in enumerate(records):
        high = 0.1 if record["preset"] == FULL else 0.0
        record["mechanism"]["separation_centroids"] = 1.0 + high + 1e-3 * (k * 7 % 5)
    assert "1 of the 1 reproduced are on separation, a score that the paper has no formula of" in (
        results_page(records).text
    )


def test_whether_seeds_have_an_effect_is_told():
    records = suite({}, presets=(AFBO, FULL, LOWRANK))  # with a planted one, five times the noise
    p = r"\(F test, p (< )?0\.\d+\)"
    told = rf"^Seeds do have an effect of their own on accuracy, which the pairing takes out {p}\.$"
    assert re.search(told, results_page(records).text, flags=re.M)
    for k, record in enumerate(records):
        record["best"] = 64 + 0.1 * (k * 5 % 12)
    assert re.search(rf"^Seeds show no effect on accuracy: .* {p}\.$", results_page(records).text, flags=re.M)


def test_what_the_argument_stands_on_comes_first():
    assert findings.central(comparison.compare(suite({}, presets=(AFBO, FULL)))) == []
    effects = {"cifar100_mlp_lowrank_r56_nopr": 3.0, "cifar100_unprojected_r56": -2.0}
    records = suite(effects)
    records = [record for record in records if not (record["preset"].endswith("_closed") and record["seed"])]
    branch, mlp, static, wide = findings.central(comparison.compare(records))
    points = r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]"
    assert re.fullmatch(
        r"\*\*Without the projection\*\*: against AFBO\+PR -[12]\..*; against OQC-LR, whose gate starts at 0\.12"
        rf" and not at 0\.5, -[12]\..*; against OQC-LR with both gates from 0\.12 {points} \(1 seed\)\.",
        branch,
    )
    assert re.fullmatch(r"\*\*OQC-LR on a plain MLP\*\*: ours \+[23]\..*; the paper has \+3\.48\.", mlp)
    assert re.fullmatch(
        rf"\*\*OQC-static over AFBO\+PR\*\*: with its gate from 0\.5, as the paper's formula has it, {points}; from"
        rf" 0\.12, where the others start, {points} \(1 seed\)\.",
        static,
    )
    assert re.fullmatch(
        rf"\*\*Over AFBO\+PR widened to the same size\*\*: OQC full {points}; OQC-LR {points}; OQC-static {points};"
        rf" OQC-dynamic {points}\.",
        wide,
    )
    assert f"- {branch}\n- {mlp}\n- {static}\n- {wide}\n" in results_page(records).text


def test_ranks_that_are_told_apart_from_the_baseline_are_named():
    """Full's R 16 is left out: a claim holds it against the baseline."""
    effects = {f"cifar100_{name}": 2.0 for name in ("full_r16", "full_r32")} | {"cifar100_lowrank_r16": -2.0}
    text = results_page(suite(effects, presets=(AFBO, *effects))).text
    (told,) = re.findall(r"^By its own interval, though no claim says so, (.*)$", text, flags=re.M)
    assert re.fullmatch(
        r"OQC-LR, R 16 falls below AFBO\+PR \(-.*, 4 seeds\) and OQC full, R 32 beats AFBO\+PR \(\+.*, 4 seeds\)\.",
        told,
    )
    assert "though no claim says so" not in results_page(suite({}, presets=(AFBO, FULL))).text


def test_a_gate_that_is_fixed_tells_nothing_of_the_spread_of_others():
    ungated = "cifar100_ungated_r56"
    records = suite({}, presets=(AFBO, FULL, LOWRANK))
    for k, record in enumerate(records):
        if record["preset"] != AFBO:
            record["mechanism"]["gate_mean"] = 0.2 + 0.01 * (k * 5 % 12)
    fixed = suite({}, presets=(ungated,))
    for record in fixed:
        record["mechanism"] |= {"gate_mean": 1.0, "gate_std": 0.0}
    row = re.compile(r"^\| Gate mean \| .*$", flags=re.M)
    (with_fixed,), (without,) = row.findall(results_page(records + fixed).text), row.findall(results_page(records).text)
    assert with_fixed == without


def test_what_was_done_to_records_by_hand_is_told():
    records = suite({}, presets=(AFBO, FULL))
    assert "Changed by hand" not in results_page(records).text
    for record in records[:3]:
        record["note"] = "the commit was written in later"
    assert "Changed by hand:\n\n- AFBO+PR (3 runs): the commit was written in later.\n" in results_page(records).text


@pytest.mark.parametrize(
    "note",
    [
        "see | below\n\n# Results\n| a | b |\n| --- | --- |\n",
        "</li><script>alert(1)</script> <!-- as in a & b, &lt; or <x@y.z>",
        "by *hand*, _twice_, __init__ and a_b, [here](x) ![there](y), `code`, ~~not~~, $x$, a\\*b\\",
    ],
)
def test_a_note_is_shown_as_it_is_written(note):
    records = suite({}, presets=(AFBO,))
    for record in records:
        record["note"] = note
    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(results_page(records).text)
    (item,) = re.findall(rf"<li>AFBO\+PR \({len(records)} runs\): (.*)\.</li>", shown)
    assert html.unescape(item) == " ".join(note.split())
    assert "<" not in item


def test_calibration_and_provenance(page, records):
    assert "| 60, frozen |" in page.text
    assert "The shortest of these that matches has 60 epochs." in page.text
    assert re.search(r"^\| 50 \| 64\.90 ± 0\.00 \| 2 \| \+0\.65 \|$", page.text, flags=re.M)
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, oqc 0.1.0, Python 3.12.3, commit ea2d3d7." in page.text
    lead, _, rest = page.text.partition("## What holds")
    assert (
        "runs on NVIDIA H200 ([provenance](#provenance)), all trained alike: 60 epochs, batch 512, AdamW at 0.002"
        in lead
    )
    assert "commit" not in lead
    assert f"{len(records)} runs on NVIDIA H200, torch" in rest.partition("## Provenance\n")[2]


@pytest.mark.parametrize(
    ("presets", "seeds"), [((AFBO,), 1), ((FULL,), 2), ((AFBO, FULL), 1), ((AFBO, FULL), 2), (("cifar100_mlp",), 3)]
)
def test_partial_files(presets, seeds):
    page = results_page(suite({}, presets=presets, seeds=seeds))
    assert "not run yet" in page.text
    for svg in page.figures.values():
        ET.fromstring(svg)


def test_another_protocol_is_told():
    records = suite({}, presets=(AFBO, FULL))
    assert "This is not the frozen protocol" not in results_page(records).text
    for record in records:
        record["config"]["train"]["epochs"] = 7
    text = results_page(records).text
    assert "all trained alike: 7 epochs" in text
    assert "This is not the frozen protocol." in text
    assert ", frozen |" not in text


@pytest.mark.parametrize(("forty", "told"), [(63.0, True), (64.0, False), (None, False)])
def test_a_page_says_calibrated_only_where_a_shorter_schedule_was_tried_and_missed(forty, told):
    records = [run(AFBO, seed, 64.2 + 0.1 * seed) for seed in range(2)]
    if forty is not None:
        records += [run("cifar100_afbo_45epochs", seed, forty) for seed in range(2)]
    text = results_page(records).text
    assert ("Epochs were calibrated on AFBO+PR alone" in text) == told
    assert ("that its epochs are the fewest to match is [not shown]" in text) != told
    assert "| 60, frozen | 64.25 ± 0.07 | 2 | +0.00 |" in text


def test_other_schedules_alone_are_called_that():
    text = results_page([run("cifar100_afbo_45epochs", seed, 63.0) for seed in range(2)]).text
    assert "Only other schedules of the baseline are run yet" in text
    assert "This is not the frozen protocol" not in text


def test_no_runs_at_all():
    page = results_page([])
    assert "Nothing is run yet" in page.text
    assert not page.figures


def test_other_files_are_a_plain_table(tmp_path):
    records = suite({}, presets=(AFBO, FULL))
    for record in records:
        record["config"]["data"]["name"] = "digits"
    page = results_page(records)
    assert page.text.startswith("# Results: digits\n")
    assert "| cifar100_full_r64 |" in page.text
    assert "Claims" not in page.text
    assert list(page.figures) == ["figures/accuracy.svg"]
    written = page.write(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == ["results.md", "figures/accuracy.svg"]


def test_plain_pages_say_what_they_can():
    records = suite({}, presets=(AFBO,), seeds=2)
    for record in records:
        record["config"]["data"]["name"] = "digits"
        record["config"]["train"] |= {"epochs": 2, "warmup": 5.0}
    assert "The CIFAR-100 presets shrunk to 8 x 8 digits" in results_page(records).text
    assert "2 epochs, batch 512, AdamW at 0.002, weight decay 0.05, 1 epoch of warmup" in results_page(records).text
    records[0]["per_epoch"].pop()  # curves of unequal length are not drawn
    assert not results_page(records).figures
    records[0]["preset"] = records[1]["preset"] = "mine"
    assert "shrunk" not in results_page(records).text


def test_unknown_presets_stand_apart():
    page = results_page([*suite({}, presets=(AFBO,)), run(FULL, 0, 1.0) | {"preset": "mine"}])
    apart = page.text.partition("## Other runs\n\n")[2]
    assert apart.startswith("On cifar100, or of no preset: no part of what stands above. 1 run on NVIDIA H200")
    assert "Training: " in apart
    assert "| mine | 1.00 |" in page.text


def test_old_figures_of_ours_go_and_others_stay(tmp_path):
    (tmp_path / "figures").mkdir()
    for name in ("pareto.svg", "own.svg"):
        (tmp_path / "figures" / name).write_text("old")
    (tmp_path / "results.md").write_text(f"{MARK}\n![pareto](figures/pareto.svg)\n")
    results_page(suite({}, presets=(AFBO,), seeds=1)).write(tmp_path)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["own.svg"]


def test_markdown_by_hand():
    assert markdown_table(("A", "B", "C"), [["x|y", "", "1"], ["z", "", ""]]) == (
        "| A | C |\n| --- | ---: |\n| x\\|y | 1 |\n| z | – |\n"
    )
    assert markdown_table(("A", "B"), [["x", "y"]], words=("B",)) == "| A | B |\n| --- | --- |\n| x | y |\n"
    assert (beside("7.19", "6.97", " M"), beside("", "6.97"), beside("1", "")) == ("7.19 M (6.97 M)", "(6.97)", "1")
    assert spread(65.594, 0.216) == "65.59 ± 0.22"
    assert spread(65.594) == "65.59"
    assert (signed(-0.0004, "separation_euclidean"), signed(1.5, "gate_mean")) == ("-0.0004", "+1.500")
    assert (p_value(0.0001), p_value(0.04)) == ("< 0.001", "0.040")
    assert [p_value(p) for p in (0.0499, 0.0501, 0.04996)] == ["0.0499", "0.0501", "0.04996"]  # on which side of 0.05
    assert [bound(x, ".2f") for x in (-0.0049, 0.0004, 0.0, 1.234)] == ["-0.005", "+0.0004", "+0.00", "+1.23"]
    assert [bound(x, ",.0f") for x in (-0.3, 1234.0)] == ["-0.3", "+1,234"]


def test_provenance_counts_what_differs():
    records = suite({}, presets=(AFBO,), seeds=3)
    records[0] = records[0] | {"environment": {"device": "cpu", "commit": "0" * 40 + "+changes"}}
    line = environment_line(records)
    assert "NVIDIA H200 (2 runs) and CPU (1 run)" in line
    assert "commit ea2d3d7 (2 runs) and commit 0000000+changes (1 run)" in line
    assert training_line({"config": {}}) == "not recorded"


def test_a_config_that_cannot_be_read_is_named():
    records = suite({}, presets=(AFBO,), seeds=1)
    records[0]["config"]["train"]["epoch"] = 3
    with pytest.raises(ValueError, match="cifar100_afbo, seed 0 has a config that cannot be read: unknown field"):
        results_page(records)


def test_speed_is_that_of_steps_measured_alone():
    records = suite({}, presets=(AFBO, FULL))
    assert comparison.compare(records).speed(FULL) == pytest.approx(0.8)
    for record in records:
        del record["images_per_s_alone"]  # trained beside another run, or beside the compiler
    assert comparison.compare(records).speed(FULL) is None
    section = results_page(records).text.partition("### Main table\n")[2]
    assert "| (5,642) | (0.58) |" in section
    for record in records:
        record["environment"] = {"device": "cpu"}
    assert comparison.compare(records).speed(FULL) == pytest.approx(0.8)


def test_images_per_s_are_of_versions_that_trained_the_baseline_too():
    records = suite({}, presets=(AFBO, FULL))
    for record in records:
        new = record["preset"] == FULL and record["seed"] > 0
        speed = 3000.0 if new else 75.0 if record["preset"] == FULL else 100.0
        record |= {"images_per_s_alone": speed, "environment": {"device": "cuda", "commit": "b" if new else "a"}}
    of = comparison.compare(records)
    assert (of.images_per_s(FULL), of.speed(FULL)) == (75.0, 0.75)
    assert "| 75 (5,642) | 0.75 (0.58) |" in results_page(records).text


def test_what_one_complement_takes_beside_another_is_told(page):
    assert "OQC-LR trains 1.000 times as fast as OQC full (the paper: 1.329), OQC-dynamic trains 1.000" in page.text


def test_runs_of_other_settings_are_left_out_and_named(records):
    other = copy.deepcopy(records)
    lowrank = [record for record in other if record["preset"] == "cifar100_lowrank_r56"]
    lowrank[0]["config"]["train"]["epochs"] = 50
    lowrank[1]["config"]["model"]["width"] = 128
    lowrank[0]["best"] = lowrank[1]["best"] = 10.0
    of = comparison.compare(other)
    assert of.rows["cifar100_lowrank_r56"]["seeds"] == 2
    assert of.rows["cifar100_lowrank_r56"]["mean"] > 60
    assert "and left out: cifar100_lowrank_r56 (seed 0), cifar100_lowrank_r56 (seed 1)." in results_page(other).text
    assert "left out" not in results_page(records).text


def test_what_holds_is_listed_with_its_corrected_p(page, records):
    found = comparison.compare(records).findings
    held = page.text.partition("## What holds")[2].partition("\n## ")[0]
    after, _, alone = held.partition("Reproduced or confirmed, by their own interval alone:")
    for claim, one in found.items():
        if one.verdict == "reproduced":
            place = after if one.p_holm < 0.05 else alone
            assert f"- **{claim.name}** (" in place
            assert f"p (Holm) {p_value(one.p_holm)}\n" in place
        else:
            assert f"**{claim.name}**" not in held


def test_the_gains_in_a_sentence():
    everywhere = {FULL: 2.0, "cifar100_lowrank_r56": 2.0, "cifar100_static_r83": 2.0, "cifar100_dynamic_r83": 2.0}
    assert findings.gains(comparison.compare(suite(everywhere))) == (
        "**Gains**: OQC full, OQC-LR, OQC-static and OQC-dynamic beat AFBO+PR by the gain's own interval; after Holm's"
        " correction over all claims all do."
    )
    assert findings.gains(comparison.compare(suite({FULL: 2.0}, presets=(AFBO, FULL)))) == (
        "**Gains**: OQC full beats AFBO+PR by the gain's own interval; after Holm's correction over all claims it does."
    )
    down = {name: -value for name, value in everywhere.items()}
    assert findings.gains(comparison.compare(suite(down))) == (
        "**Gains**: by its own interval no complement beats AFBO+PR."
    )
    assert findings.gains(comparison.compare([])) == ""


def test_how_much_turns_on_static():
    text = results_page(suite({"cifar100_static_r83": -5.0, FULL: 3.0})).text
    told = r"^OQC-static is one side of \d+ of the \d+ reproduced and \d+ of the \d+ contradicted\."
    assert re.search(told, text, flags=re.M)
    assert "OQC-static is one side of" not in results_page(suite({}, presets=(AFBO, FULL))).text


def test_the_suites_time_beside_that_of_their_runs():
    records = suite({}, presets=(AFBO, FULL))
    assert "The suites took" not in results_page(records).text
    for record, wall in zip(records, (60, 10, 70, 20), strict=False):
        record |= {"wall_seconds": wall, "seconds": 64, "at_once": 2, "setup_seconds": 4}
    assert (
        "The suites took 1.25 times as long as their runs trained and evaluated, over 4 runs, those side by side"
        " counted by their shares; of the rest 50% is building and compiling."
    ) in results_page(records).text


def test_claims_that_came_after_their_runs_are_marked_and_the_rest_counted_apart(page, records):
    found = comparison.compare(records).findings
    late = [claim for claim in found if claim.late]
    assert {claim.place for claim in late} == {"table 3", "rank figure (a)"}
    early = Counter(one.verdict for one in found.values() if not one.claim.late and one.claim.place != OURS)
    told = re.search(r" (\d+) of them, marked †, were written down .*; without these: (.*?)\.", page.text)
    assert int(told[1]) == len(late) == 9
    assert {name: int(n) for n, name in (part.split(" ", 1) for part in told[2].split(", "))} == early
    for claim in found:
        assert (f"| {claim.name} † |" in page.text) == claim.late
    assert "†" not in results_page(suite({}, presets=(AFBO, FULL))).text.partition("## Claims")[0]


def test_what_the_runs_without_a_partner_would_change_is_told():
    """One seed of full beside four of AFBO+PR: the pair is taken where AFBO+PR happens to be high."""
    records = suite({}, presets=(AFBO, LOWRANK, FULL))
    highs = {0: 1.0, 1: 0.0, 2: 0.1, 3: -0.1}
    for k, record in enumerate(records):
        if record["preset"] == AFBO:
            record["best"] = 64 + highs[record["seed"]]
        else:
            record["best"] = (64 if record["preset"] == LOWRANK else 65.3) + 0.1 * (k % 3)
    records = [record for record in records if record["preset"] != FULL or record["seed"] == 0]
    of = comparison.compare(records)
    claim = next(claim for claim in of.findings if claim.name == "OQC full beats AFBO+PR")
    assert of.findings[claim].verdict == "same sign"
    (fitted,) = assess_all([claim], of.frozen, paired=False)
    assert fitted.difference > of.findings[claim].difference
    same = "no other claim would be reproduced, confirmed, contradicted or refuted."
    line = re.search(
        r"^By a fit of models and seeds to all runs, .* too: (.*)$", results_page(records).text, flags=re.M
    )
    assert (line[1] == same) == (fitted.verdict == "same sign")
    even = re.search(r"^By a fit of .* too: (.*)$", results_page(suite({FULL: 1.34})).text, flags=re.M)
    assert even[1] == same  # all models have all seeds: the fit is the pairs' mean


def test_a_difference_of_nothing_is_on_neither_side():
    records = suite({}, presets=(AFBO, FULL, LOWRANK))
    for record in records:
        if record["preset"] == FULL:
            record["best"] = next(r["best"] for r in records if (r["preset"], r["seed"]) == (AFBO, record["seed"]))
        else:
            record["best"] += record["seed"] % 2
    text = results_page(records).text.partition("## What points the other way")[2].partition("\n## ")[0]
    assert "On neither side: 'OQC full beats AFBO+PR', with a difference of 0." in text
    assert "**OQC full beats AFBO+PR**" not in text


def test_runs_of_other_models_than_their_presets_alone():
    records = suite({}, presets=(FULL,))
    for record in records:
        record["config"]["model"]["width"] = 128
    assert "No run is of its preset's own model and schedule." in results_page(records).text


def test_images_per_s_of_another_version_stand_with_its_commit():
    records = suite({}, presets=(AFBO, FULL))
    for record in records:
        commit = {AFBO: "a" * 40, FULL: "b" * 40}[record["preset"]]
        record["environment"] = record["environment"] | {"commit": commit}
    section = results_page(records).text.partition("### Main table\n")[2].partition("\n### ")[0]
    assert "| 60,000 (9,762) | 1.00 (1.00) |" in section
    assert "| 48,000 at bbbbbbb (5,642) | (0.58) |" in section


def test_runs_beside_other_work_are_told_and_count_for_no_speed():
    records = suite({}, presets=(AFBO, FULL))
    assert "shared the device" not in results_page(records).text
    for record in records[4:]:
        record["shared_device"] = True
    assert f"{len(records) - 4} runs shared the device" in results_page(records).text
    assert comparison.compare(records).speed(FULL) is None


def test_speeds_of_two_versions_of_the_code_are_not_compared():
    def at(commit, records, speed):
        return [record | {"images_per_s_alone": speed, "environment": {"commit": commit}} for record in records]

    afbo, full = (suite({}, presets=(preset,)) for preset in (AFBO, FULL))
    assert comparison.compare(at("a", afbo, 100.0) + at("b", full, 300.0)).speed(FULL) is None
    mixed = at("a", afbo[:2], 100.0) + at("b", afbo[2:], 400.0) + at("b", full, 300.0)
    assert comparison.compare(mixed).speed(FULL) == pytest.approx(0.75)


def without_end(record, epoch=3):
    """The record as it would be had the run diverged."""
    lost = ("best", "final", "parameters", "images_per_s", "images_per_s_alone", "mechanism", "setup_seconds")
    return {k: v for k, v in record.items() if k not in lost} | {"diverged": {"epoch": epoch, "step": 200}}


def test_runs_that_diverged_are_named_and_in_no_mean(page, records):
    lost = next(record for record in records if (record["preset"], record["seed"]) == (FULL, 1))
    rest = [record for record in records if record is not lost]
    found = results_page([*rest, without_end(lost)])
    told = f"1 of {len(records)} runs diverged and is in no mean and no claim: {FULL} (seed 1, in epoch 3).\n\n"
    assert found.text.replace(told, "") == results_page(rest).text  # all the rest as if it were not there
    assert found.text.index(told) < found.text.index("## What holds")
    assert "diverged" not in page.text


def test_a_model_of_which_every_run_diverged_is_not_called_not_run():
    records = suite({}, presets=(AFBO, FULL), seeds=3)
    found = comparison.compare([without_end(one) if one["preset"] == FULL else one for one in records])
    text = results_page([*found.records, *found.diverged]).text
    assert "| 65.59 ± 0.22 | diverged | – |" in text.partition("### Main table")[2].partition("###")[0]
    assert found.findings[next(claim for claim in found.findings if claim.plus == (FULL,))].why == "diverged"
    nothing = results_page([without_end(one) for one in records]).text
    assert "6 of 6 runs diverged" in nothing
    assert "Nothing is run yet" not in nothing


def test_plain_pages_name_runs_that_diverged():
    records = suite({}, presets=(AFBO, FULL), seeds=2)
    for record in records:
        record["config"]["data"] = {"name": "digits"}
    page = results_page([*records[:3], without_end(records[3])])
    assert f"1 of 4 runs diverged and is in no mean and no claim: {FULL} (seed 1, in epoch 3)." in page.text
    assert page.figures == results_page(records[:3]).figures
    assert results_page([without_end(record) for record in records]).figures == {}
