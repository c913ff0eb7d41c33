"""Scripts are followed as far as their text determines them, and nothing of them is run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from simtune.emit.importing.shell import MOST_COMMANDS, read_script
from simtune.emit.importing.shell_words import MOST_CHARACTERS
from simtune.errors import SpecError

SCRIPTS = {
    "quotes": """x='a b'; show "$x" $x '$x' "\\$x" a\\ b "" "${x}c" """,
    "defaults": """E=; show "${A:-one two}" "${A-x}" "${E:-y}" "${E-z}" ${E:+no} "${B:=kept}" "$B" """,
    "continued": "show a \\\n  b \\\n  'c\nd' # not this\nshow e;show f&&show g||show h",
    "sums": "N=6; show $((N*2)) $(( (N + 1) % 4 )) $((N/4-3))",
    "arrays": """A=(-x "b c"); A+=(d); show "${A[@]}" "${A[0]}" """,
    "functions": """f() {\n  show "$1" "${2:-none}" "$@"\n}\nf a; f b "c d"\n""",
    "if": """N=8
if [[ $N -eq 4 ]]; then show four
elif [ "$N" -ge 8 ] && [ -n "$N" ]; then show many
else show few; fi
[ "$N" = 8 ] || show no
[ "$N" = 8 ] && show yes
if [ -z "$N" ]; then show empty; else
  if [ "$N" != 8 ]; then show a; else show b; fi
fi""",
    "case": """C=h200
case "$C" in
  h100|a100) show old ;;
  h2*) show new; show two;;
  *) show other
esac
show z""",
    "for": "for i in 0 1 2; do show $i $((8000 + i)); done\nfor x in a b\ndo\n show $x\ndone",
    "operators": "show a > /dev/null 2>&1\nshow b | cat | cat\n( show c )\n{ show d; show e; }\nX=1 show f",
    "exports": "export A=1 B='2 3'\nreadonly C=4\nshow $A \"$B\" $C",
    "here": "cat > /dev/null << END\nshow inside $X\nEND\nshow after",
}


def lines(script: str) -> list[str]:
    commands = read_script(script, "s", {}).commands
    return ["|".join(command.words[1:]) for command in commands if command.words[0] == "show"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_a_shell_runs_it(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash, whose answers are the truth here")
    show = f"""show() {{ local IFS='|'; printf '%s\\n' "$*" >> {tmp_path}/calls; }}\n"""
    subprocess.run([bash, "-c", show + SCRIPTS[name]], check=False, timeout=20, stdout=subprocess.DEVNULL)
    # bash has a newline inside a word, too.
    assert "\n".join(lines(SCRIPTS[name])) == (tmp_path / "calls").read_text().rstrip("\n")


def test_what_is_not_known_stays_open() -> None:
    script = 'show $A "$(date)" `id` $((A+1)) ${A#x} "${A%%y}"\nif [ "$A" ]; then B=1; else B=2; fi\nshow $B\n'
    assert lines(script) == ["${A}|$(|$(|${A}|${A}|${A}", "${B}"]
    known = read_script(script, "s", {"A": "3", "B": "9"}).commands
    assert known[-1].words == ("show", "9")


def test_commands_under_an_unknown_condition_are_marked() -> None:
    first, second, third = read_script("if grep x y; then a; else b; fi\nc\n", "s", {}).commands
    assert (first.conditional, second.conditional, third.conditional) == (True, True, False)


def test_here_documents_are_files() -> None:
    script = (
        "X=4\ncat > a.yml << EOF\nn: $X\nEOF\ncat << 'EOF' >> a.yml\nm: $X\nEOF\ncat <<-E | tee b.yml\n\tk: 1\n\tE\n"
    )
    assert read_script(script, "s", {}).files["a.yml"] == "n: 4\nm: $X\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("a 'b", "s:1: a quoted text has no end"),
        ('\na "b', "s:2: a quoted text has no end"),
        ("a $(b", "has no end; close it"),
        ("a ${b", "has no end; close it"),
        ("cat << EOF\nx\n", "the text up to EOF has no end"),
        ("f() {\n f; f\n}\nf\n", "blocks nested deeper"),
        ("f() {\n:\n}\n" + "for i in 1 2 3 4 5 6 7 8 9 0; do\n" * 6 + "f\n" + "done\n" * 6, f"{MOST_COMMANDS:,}"),
        ("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40, "its values make more than"),
        ("A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, "its values make more than"),
        ("a" * (MOST_CHARACTERS + 1), "is longer than"),
        ("if [ a ]; then\n" * 200 + "a\n" + "fi\n" * 200, "blocks nested deeper"),
    ],
)
def test_hostile_scripts_are_refused(script: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_script(script, "s", {})
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    read_script(
        f"touch {target}; x=$(touch {target}); echo `touch {target}` > {target}; eval 'touch {target}'", "s", {}
    )
    assert not target.exists()
