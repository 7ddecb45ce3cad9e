# Read by every interactive bash, so no command may be forked here.
[ -n "$PS1" ] || return
shopt -s checkwinsize
PS1='\u@\h:\w\$ '
alias ls='ls --color=auto'
alias grep='grep --color=auto'
