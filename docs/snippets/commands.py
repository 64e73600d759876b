import shlex

from opfuser.cli import main

for line in (
    "diff explained_model:build --fusion activation_linear --dtype bf16",
    "explain explained_model:build --why activation_linear --at 4",
):
    print(f"$ opfuser {line}")
    main(shlex.split(line))
    print()
