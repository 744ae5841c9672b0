"""The command line: a module for each noun, loaded when one of its commands is run."""
