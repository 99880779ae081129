"""The command line. Each command is one module; heavy imports happen inside commands."""
