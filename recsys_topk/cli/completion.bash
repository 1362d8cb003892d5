_recsys_topk() {
  local words="" word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  if [ "$COMP_CWORD" -eq 1 ]; then words="%(commands)s"
  else case "$before" in
%(values)s
    *) case "${COMP_WORDS[1]}" in
%(options)s
    esac;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _recsys_topk recsys-topk
