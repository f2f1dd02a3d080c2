if __name__ == "commands":  # the folder is part of slimecli; a second copy under its bare name would split its state
    raise ImportError("import this package as slimecli.commands")
