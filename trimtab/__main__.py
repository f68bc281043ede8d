"""`python -m trimtab` is the `trimtab` command; torchrun enters here."""

from trimtab.cli import main

if __name__ == "__main__":
    main()
