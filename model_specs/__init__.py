if __name__ == "model_specs":  # the folder is part of slimecli; a second copy under its bare name would split its state
    raise ImportError("import this package as slimecli.model_specs")
