"""Hold transformers to an exported folder: same logits, same ids for the same text, same greedy text.

    python launch/check_export.py runs/export

needs torch and transformers (CPU is enough) and reads the reference that the export left in export_check.npz. Exit
status 0 when everything agrees, 1 with one line for each difference.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

MAX_DELTA_LOGIT = 1e-4


def check(folder: pathlib.Path) -> tuple[dict[str, object], list[str]]:
    """(numbers for export.json, differences in words) of a folder."""
    reference = np.load(folder / "export_check.npz")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    faults = [f"{kind}: {sorted(info[kind])[:4]}" for kind in ("missing_keys", "unexpected_keys") if info[kind]]
    if not tokenizer.chat_template:
        faults.append("the folder has no chat template")
    model.eval()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    largest, equal_texts = 0.0, 0
    for row, text in enumerate(reference["texts"]):
        ids = reference["prompt_ids"][row, : reference["lengths"][row]].tolist()
        theirs = tokenizer.encode(str(text), add_special_tokens=False)
        if theirs != ids:
            faults.append(f"{text!r} encodes as {theirs}, exported was {ids}")
        batch = torch.tensor([ids])
        with torch.no_grad():
            logits = model(batch).logits[0, -1].numpy()
            new = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                temperature=None,
                max_new_tokens=reference["greedy_ids"].shape[1],
            )[0, len(ids) :].tolist()
        largest = max(largest, float(np.abs(logits - reference["logits"][row]).max()))
        ours = reference["greedy_ids"][row].tolist()
        stop = next((i + 1 for i, token in enumerate(ours) if token in ends), len(ours))
        if tokenizer.decode(new) == tokenizer.decode(ours[:stop]):
            equal_texts += 1
        else:
            faults.append(
                f"greedy text after {text!r}: {tokenizer.decode(new)!r}, ours {tokenizer.decode(ours[:stop])!r}"
            )
    if not largest <= MAX_DELTA_LOGIT:
        faults.append(f"logits differ by {largest:.2e}, allowed is {MAX_DELTA_LOGIT:.0e}")
    numbers = {"transformers_max_delta_logit": largest, "transformers_equal_texts": equal_texts}
    return numbers | {"transformers_prompts": len(reference["texts"]), "transformers_faults": len(faults)}, faults


def main() -> int:
    """Check, add the numbers to export.json, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="folder that export wrote")
    folder = parser.parse_args().folder
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # one row at a time leaves a second thread nothing but waiting
    numbers, faults = check(folder)
    report = folder / "export.json"
    if report.is_file():
        content = json.loads(report.read_text(encoding="utf-8")) | numbers
        report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for fault in faults:
        print(f"check_export: {fault}")
    print(
        f"check_export: {folder}: transformers' logits within {numbers['transformers_max_delta_logit']:.1e}, greedy "
        f"text equal on {numbers['transformers_equal_texts']} of {numbers['transformers_prompts']} prompts"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
