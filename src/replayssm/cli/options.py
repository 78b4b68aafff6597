"""Options that several commands have."""

import typer

MODEL = "a shipped name or a Hugging Face folder"
DTYPE = typer.Option(help="weights and activations: fp32, bf16, fp16, or auto (as stored)")
WINDOW = typer.Option(
    min=1,
    max=4096,
    help="entries of the buffer, drafts included (default: 16 + drafts; on a GPU --batch-file takes the fastest)",
    show_default=False,
)
PRECISION = typer.Option(
    help="how states are stored: checkpoint[sr][+read copy], such as float32, float32+fp8, fp16sr+nvfp4, int8"
)
