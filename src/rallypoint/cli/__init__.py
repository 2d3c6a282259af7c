"""Arguments in, exit status out.

`main` finds the command; a file of the command's name does it. What a command takes and what is
said of a wrong line are tables:

- a new option is a row of `options`; a new kind of value is a function of `option_values`
- a new command is a row of `commands`, a file, and its name in `main`
- what people of other tools type is a row of a table in `hints`; what is guessed from a wrong
  line, a function there

`args` takes a line apart and reads its values; `run_options` makes of those of `run` what the
launcher is asked for. `help` is made from the same tables.
"""
