# Bounds of the test of instance norm: for each kind and size, failures in 2,000 draws, and the largest difference as a share of the bound,
# with the old bound and the new one. Needs PyTorch.
import torch
def worst(kind, dims, new, seeds):
    bad=0; m=0
    for s in range(seeds):
        torch.manual_seed(s)
        x=torch.randn(dims)*0.5+3.0; up=torch.randn(dims)
        h=x.to(kind).double().requires_grad_(True)
        e=torch.nn.functional.instance_norm(h, eps=1e-5); (e*up.to(kind).double()).sum().backward()
        f=x.to(kind).float().requires_grad_(True)
        g=torch.nn.functional.instance_norm(f, eps=1e-5); (g*up.to(kind).float()).sum().backward()
        got=f.grad.to(kind).double(); exp=h.grad
        d=(got-exp).abs()
        if new:
            inv=1/(h.detach().var((2,3),unbiased=False,keepdim=True)+1e-5).sqrt()
            rel={torch.float:1e-6, torch.bfloat16:2**-8}[kind]
            r=(d/(rel*exp.abs()+2e-5*inv)).max().item()
        else:
            r=(d.max()/{torch.float:2e-5,torch.bfloat16:0.05}[kind]).item()
        m=max(m,r); bad+=r>=1
    return bad,m
for kind in (torch.float,torch.bfloat16):
    for dims in ([1,4,2,2],[3,40,6,6],[2,256,3,5]):
        print(kind,dims,'old',worst(kind,dims,False,2000),'new',worst(kind,dims,True,2000))
