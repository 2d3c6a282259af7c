#!/bin/sh
# A program of another kind than Python: its arguments, and what it finds.
echo "say: $* rank=$RANK local=$LOCAL_RANK error=${TORCHELASTIC_ERROR_FILE:+set} share=$TORCHELASTIC_USE_AGENT_STORE"
