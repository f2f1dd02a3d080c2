if __name__ == "data_tools":  # the folder is part of slimecli; a second copy under its bare name would split its state
    raise ImportError("import this package as slimecli.data_tools")
