"""Code that runs in the template: the process that imports once and is forked for every rank."""
