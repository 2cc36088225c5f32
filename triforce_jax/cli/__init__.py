"""The commands: flags in, text or JSON on stdout, everything else on stderr."""
