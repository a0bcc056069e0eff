"""Experts for three domains of different difficulty, at equal compute, and their exact mixture: HDEE and Branch-Train-Merge.

    python examples/13_experts.py
    python examples/13_experts.py --steps 400 --out runs/experts

It consists of `thinwire train`, `branch`, `evaluate`, `sample` and `export`, and prints every command before it runs. A domain is text
of a random source of letters: the more letters may follow two others, the harder it is to predict.
"""

import argparse
import random
import shlex
import tempfile
from pathlib import Path

from thinwire.app.cli import main as thinwire

LETTERS = {"easy": ("abcd ", 2), "medium": ("efghijklm ", 3), "hard": ("abcdefghijklmnopqrstuvwxyz ", 6)}
SHARES = {"easy": 0.75, "medium": 1.0, "hard": 1.25}  # of the steps; the paper has 300, 400 and 500


def text_of(domain: str, length: int) -> str:
    """Returns `length` letters; after every two, one of a few letters that are drawn for this domain follows."""
    (letters, few), draw = LETTERS[domain], random.Random(domain)
    after = {a + b: draw.sample(letters, few) for a in letters for b in letters}
    text = letters[:2]
    for _ in range(length):
        text += draw.choice(after[text[-2:]])
    return text


def run(command: str) -> None:
    print(f"\n$ thinwire {command}", flush=True)
    if code := thinwire(shlex.split(command)):
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="inner steps of an expert, mean (default: %(default)s)")
    parser.add_argument("--out", default=None, help="folder for texts, seed and experts (default: a temporary one)")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    texts = {domain: out / f"{domain}.txt" for domain in LETTERS}
    for domain, file in texts.items():
        file.write_text(text_of(domain, 60_000))
    every = " ".join(shlex.quote(str(file)) for file in texts.values())
    small = "--model nano --batch 4 --sequence 64 --carrier threads --every 10 --eval-batches 4"
    run(f"train --text {every} --steps {options.steps} {small} --out {out}/seed")
    for domain, file in texts.items():
        steps = round(options.steps * SHARES[domain])
        run(f"branch {out}/seed --domain {domain} --text {file} --steps {steps} --out {out}/experts")
    run(f"evaluate {out}/experts --text {every} --eval-batches 4")
    run(f"sample {out}/experts 'abab' --tokens 40")
    run(f"export {out}/experts --to safetensors --out {out}/mean")


if __name__ == "__main__":
    main()
